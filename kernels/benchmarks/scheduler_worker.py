"""One scheduler of `scheduler.py` in a process of its own: JSON lines in, JSON lines out.

    PYTHON scheduler_worker.py lmscope|vllm

It runs under the interpreter of either engine. The first line out says that the scheduler is
imported, and its version. Then each {"load": name} is answered with what the steps of that load
cost, or with {"error": words}.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from scheduler_load import EOS, LOADS, Load, Plan, token_at

__all__ = ["ENGINES", "Engine", "run", "serve"]


class Engine(Protocol):
    """A scheduler with nothing in it yet, and how to talk to it.

    Outputs have vLLM's names in both. Only `schedule` and `update` are timed.
    """

    schedule: Callable[[], Any]

    def add(self, plan: Plan) -> None: ...
    def answer(self, output: Any, sampled: list[list[int]]) -> Any:
        """The model's answer: for each scheduled request, in order, the tokens it produced."""
        ...

    def update(self, output: Any, answer: Any) -> Any: ...
    def finished(self, outputs: Any) -> list[str]:
        """The requests that an update ended."""
        ...


def serve(name: str) -> None:
    """Import a scheduler, then answer requests from standard input until it ends."""
    # Only answers may reach the driver, so whatever libraries print goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        make_engine, version = ENGINES[name]()
    except Exception as error:  # whatever an import raises, the driver must hear of it
        answer(error=f"{type(error).__name__}: {error}")
        return
    # As vLLM's engine does: what is imported by now is never garbage, and not looked at again.
    gc.collect()
    gc.freeze()
    answer(ready=name, version=version)
    for line in sys.stdin:
        load = LOADS[json.loads(line)["load"]]
        try:
            result = run(make_engine(load), load)
        except Exception as error:  # it is the driver that decides what an error means
            answer(error=repr(error))
            continue
        answer(**result)


def run(engine: Engine, load: Load) -> dict[str, float]:
    """Run a load on a fresh scheduler and count what its measured steps cost.

    schedule_s, update_s   CPU seconds of this thread, all measured steps together
    num_tokens             scheduled in the measured steps
    num_finished           requests that ended in them
    num_preemptions        in them
    """
    loop = _Loop(engine)
    loop.finish_all(load.plans_before(), load.num_live)
    plans = load.plans()
    loop.add(islice(plans, load.num_live))
    for _ in range(load.num_warm_steps):
        loop.add(islice(plans, loop.step()))
    loop.reset()
    gc.collect()
    for _ in range(load.num_steps):
        loop.add(islice(plans, loop.step()))
    return {
        "schedule_s": loop.schedule_s,
        "update_s": loop.update_s,
        "num_tokens": loop.num_tokens,
        "num_finished": loop.num_finished,
        "num_preemptions": loop.num_preemptions,
    }


class _Loop:
    """Steps of an engine whose model reads its tokens from the plans."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._plans: dict[str, Plan] = {}
        self._num_outputs: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        self.schedule_s = self.update_s = 0.0
        self.num_tokens = self.num_finished = self.num_preemptions = 0

    def add(self, plans: Iterator[Plan]) -> None:
        for plan in plans:
            self._plans[plan.request_id] = plan
            self._num_outputs[plan.request_id] = 0
            self.engine.add(plan)

    def finish_all(self, plans: Iterator[Plan], num_live: int) -> None:
        """Run requests to their ends, `num_live` at a time."""
        self.add(islice(plans, num_live))
        while self._plans:
            self.add(islice(plans, self.step()))

    def step(self) -> int:
        """One engine step; returns how many requests ended in it."""
        engine = self.engine
        began = time.thread_time()
        output = engine.schedule()
        self.schedule_s += time.thread_time() - began

        answer = engine.answer(output, self._sample(output))
        began = time.thread_time()
        outputs = engine.update(output, answer)
        self.update_s += time.thread_time() - began

        self.num_tokens += output.total_num_scheduled_tokens
        self.num_preemptions += len(output.preempted_req_ids or ())
        finished = engine.finished(outputs)
        for request_id in finished:
            del self._plans[request_id], self._num_outputs[request_id]
        self.num_finished += len(finished)
        return len(finished)

    def _sample(self, output: Any) -> list[list[int]]:
        """A token for each request whose last known token is in the batch."""
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        sampled: list[list[int]] = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            plan, position = self._plans[request_id], self._num_outputs[request_id]
            known = len(plan.prompt_token_ids) + position
            if computed[request_id] + num_tokens < known:
                sampled.append([])
                continue
            sampled.append([token_at(plan, position)])
            self._num_outputs[request_id] += 1
        return sampled


# --- the two engines -----------------------------------------------------------------------


def import_lmscope() -> tuple[Callable[[Load], Engine], str]:
    """A maker of lmscope's scheduler for a load, and its version."""
    import lmscope
    from lmscope.boundary import EngineCoreRequest, ModelRunnerOutput
    from lmscope.engine.prefix_hash import BlockHasher
    from lmscope.engine.request import Request
    from lmscope.engine.scheduler import Scheduler, SchedulerConfig
    from lmscope.sampling_params import SamplingParams

    class LmscopeEngine:
        def __init__(self, load: Load) -> None:
            self.scheduler = Scheduler(
                SchedulerConfig(
                    block_size=load.block_size,
                    num_blocks=load.num_blocks,
                    max_num_seqs=load.num_live,
                    max_num_batched_tokens=load.max_num_batched_tokens,
                    max_model_len=load.max_model_len,
                )
            )
            self.hasher = BlockHasher(load.block_size)
            self.schedule = self.scheduler.schedule
            self.update = self.scheduler.update_from_output

        def add(self, plan: Plan) -> None:
            core_request = EngineCoreRequest(
                request_id=plan.request_id,
                prompt_token_ids=plan.prompt_token_ids,
                sampling_params=SamplingParams(temperature=0, max_tokens=plan.max_tokens),
                eos_token_id=EOS,
            )
            self.scheduler.add_request(Request(core_request, self.hasher))

        def answer(self, output: Any, sampled: list[list[int]]) -> Any:
            return ModelRunnerOutput(
                step=output.step,
                req_ids=tuple(output.num_scheduled_tokens),
                sampled_token_ids=tuple(map(tuple, sampled)),
            )

        def finished(self, outputs: Any) -> list[str]:
            return [o.request_id for o in outputs.outputs if o.finish_reason is not None]

    return LmscopeEngine, lmscope.__version__


def import_vllm() -> tuple[Callable[[Load], Engine], str]:
    """A maker of vLLM's scheduler for a load, with a model's configuration and no model."""
    # Wheels of these that do not fit the installed torch break the import, and nobody needs them.
    for name in ("torchvision", "torchaudio", "torchcodec"):
        sys.modules[name] = None  # type: ignore[assignment]  # this is how an import is refused
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import tempfile

    import torch
    import vllm
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory()  # removed with the last maker of schedulers
    with open(os.path.join(folder.name, "config.json"), "w") as file:
        json.dump(_LLAMA, file)
    hash_function = get_hash_fn_by_name(CacheConfig().prefix_caching_hash_algo)
    init_none_hash(hash_function)
    configs: dict[str, VllmConfig] = {}

    def config_of(load: Load) -> VllmConfig:
        if load.name not in configs:  # it takes seconds
            config = VllmConfig(
                model_config=ModelConfig(
                    model=folder.name,
                    skip_tokenizer_init=True,
                    dtype="float32",
                    max_model_len=load.max_model_len,
                ),
                cache_config=CacheConfig(block_size=load.block_size, enable_prefix_caching=True),
                scheduler_config=SchedulerConfig(
                    max_num_seqs=load.num_live,
                    max_num_batched_tokens=load.max_num_batched_tokens,
                    max_model_len=load.max_model_len,
                    is_encoder_decoder=False,
                    async_scheduling=False,
                ),
            )
            config.cache_config.num_gpu_blocks = load.num_blocks
            configs[load.name] = config
        return configs[load.name]

    class VllmEngine:
        def __init__(self, load: Load) -> None:
            config = config_of(load)
            layers = FullAttentionSpec(
                block_size=load.block_size, num_kv_heads=2, head_size=64, dtype=torch.float32
            )
            self.scheduler = Scheduler(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(
                    num_blocks=load.num_blocks,
                    kv_cache_tensors=[],
                    kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)],
                ),
                structured_output_manager=StructuredOutputManager(config),
                block_size=load.block_size,
                log_stats=False,
            )
            self.hasher = get_request_block_hasher(load.block_size, hash_function)
            self.schedule = self.scheduler.schedule
            self.update = self.scheduler.update_from_output

        def add(self, plan: Plan) -> None:
            params = SamplingParams(temperature=0, max_tokens=plan.max_tokens)
            params._eos_token_id = EOS
            self.scheduler.add_request(
                Request(
                    request_id=plan.request_id,
                    prompt_token_ids=list(plan.prompt_token_ids),
                    sampling_params=params,
                    pooling_params=None,
                    block_hasher=self.hasher,
                )
            )

        def answer(self, output: Any, sampled: list[list[int]]) -> Any:
            ids = list(output.num_scheduled_tokens)
            return ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
            )

        def finished(self, outputs: Any) -> list[str]:
            return [
                output.request_id
                for of_client in outputs.values()
                for output in of_client.outputs
                if output.finish_reason is not None
            ]

    return VllmEngine, str(vllm.__version__)


# Any model's configuration will do: a scheduler looks at no more than its maximum length.
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}

ENGINES: dict[str, Callable[[], tuple[Callable[[Load], Engine], str]]] = {
    "lmscope": import_lmscope,
    "vllm": import_vllm,
}


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1 or arguments[0] not in ENGINES:
        sys.exit(f"usage: scheduler_worker.py {'|'.join(ENGINES)}")
    serve(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
