"""What tests of whole engines share: prompts, parameters, and a run that keeps what it gave."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lmscope import LLM, SamplingParams
from lmscope.boundary import ModelRunnerOutput, SchedulerOutput

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
A = [5, 9, 33, 71, 2, 15, 8, 90, 64, 21, 7, 40, 3, 88, 17, 56, 29, 4, 11]
PROMPTS = [A, [77], [*A[:17], 60, 61, 62], [3, 4, 5]]
# A pool of 15 usable blocks holds 60 tokens, fewer than the requests come to.
POOL = {"num_kv_blocks": 16, "block_size": 4, "max_num_batched_tokens": 12, "max_num_seqs": 4}
# Rows that are drawn, filtered, penalised and asked for log probabilities, side by side.
MIXED = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=2.0, seed=-(1 << 40), max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=5, top_k=20, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.5, seed=6, top_p=0.8, min_p=0.001, max_tokens=12, ignore_eos=True),
]
GREEDY = [SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)] * 4


class Run:
    """What one engine gave: tokens and log probabilities of each request, and its structs."""

    def __init__(
        self,
        folder: Path,
        backend: str,
        params: list[SamplingParams],
        measures: bool = False,
        prompts: list[list[int]] = PROMPTS,
        **options: Any,
    ) -> None:
        self.scheduled: list[SchedulerOutput] = []
        self.ran: list[ModelRunnerOutput] = []
        with LLM(
            folder,
            attention_backend=backend,
            device="cpu" if IS_INTERPRETED or backend == "torch" else "cuda",
            threads=1,
            exact=True,
            **{"dtype": "float32", **POOL, **options},
        ) as llm:
            self.plan = llm.plan
            llm.tap.on(SchedulerOutput, self.scheduled.append)
            llm.tap.on(ModelRunnerOutput, self.ran.append)
            measure = llm.measure_attention(by_head=True) if measures else None
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
            )
            self.by_head = measure.by_head() if measure is not None else {}
        self.tokens = [each.outputs[0].token_ids for each in outputs]
        self.logprobs = [each.outputs[0].logprobs for each in outputs]
        self.prompt_logprobs = [each.prompt_logprobs for each in outputs]
        self.errors = [each.outputs[0].finish_reason for each in outputs]

    @property
    def num_preemptions(self) -> int:
        return sum(len(each.preempted_req_ids) for each in self.scheduled)
