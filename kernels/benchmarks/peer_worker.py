"""One engine of `peers.py` in a process of its own: JSON lines in, JSON lines out.

The first line out says that the engine is loaded, and what `model` names for other engines. Then
each {"prompts": [[token id]], "num_output_tokens": [n]} is answered with the generated ids and
what they cost, or with {"error": words}.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["ENGINES", "Engine", "serve"]

# Prompts, and for each the number of tokens to generate -> the generated token ids.
Generate = Callable[[list[list[int]], list[int]], list[list[int]]]


class Engine(NamedTuple):
    """A loaded engine: the model's folder, and how to generate with it."""

    model: str
    generate: Generate


def serve(name: str, model: str, threads: int) -> None:
    """Load an engine, then answer requests from standard input until it ends."""
    # Only answers may reach the driver, so whatever libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    began = time.perf_counter()
    engine = ENGINES[name](model, threads)
    answer(ready=name, model=engine.model, load_s=time.perf_counter() - began)
    for line in sys.stdin:
        request = json.loads(line)
        began, cpu_began = time.perf_counter(), time.process_time()
        try:
            token_ids = engine.generate(request["prompts"], request["num_output_tokens"])
        except Exception as error:  # whatever went wrong in a peer, the driver must hear of it
            answer(error=repr(error))
            continue
        answer(
            wall_s=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu_began,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            token_ids=token_ids,
        )


def load_lmscope(model: str, threads: int) -> Engine:
    """As a user gets it, in float32 as the reference."""
    from lmscope import LLM, SamplingParams

    llm = LLM(model, dtype="float32", threads=threads)

    def generate(prompts: list[list[int]], num_output_tokens: list[int]) -> list[list[int]]:
        # Prompts come again in each round: with their blocks kept there would be no prefill.
        if not llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset")
        outputs = llm.generate(
            [{"prompt_token_ids": token_ids} for token_ids in prompts],
            [
                SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                for count in num_output_tokens
            ],
            use_tqdm=False,
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return Engine(str(llm.model), generate)


def load_transformers(model: str, threads: int) -> Engine:
    """One padded batch, which runs until the longest output is done."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    # Otherwise it ends at EOS, and warns in each call that it pads with it.
    module.generation_config.eos_token_id = None
    padding = module.config.pad_token_id or 0

    def generate(prompts: list[list[int]], num_output_tokens: list[int]) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = [[padding] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.inference_mode():
            output = module.generate(
                input_ids=torch.tensor(padded),
                attention_mask=torch.tensor(mask),
                max_new_tokens=max(num_output_tokens),
                do_sample=False,
                pad_token_id=padding,
            )
        rows = output[:, longest:].tolist()
        return [row[:count] for row, count in zip(rows, num_output_tokens, strict=True)]

    return Engine(model, generate)


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "lmscope": load_lmscope,
    "transformers": load_transformers,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One engine of peers.py.")
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    serve(options.engine, options.model, options.threads)
