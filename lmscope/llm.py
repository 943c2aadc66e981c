"""LLM: an engine in this process, with a thread of its own.

llm = LLM("demo")
outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=16))
stream = llm.submit("Tell me a story.")     # returns at once
"""

from __future__ import annotations

import atexit
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, cast

import msgspec

from lmscope.attention_measure import AttentionMeasure
from lmscope.boundary import EngineCoreRequest, EngineInfo, EngineSnapshot, RequestOutput
from lmscope.collection import paused_collection
from lmscope.config import EngineConfig, EngineOptions, ModelFacts, num_cores, resolve
from lmscope.engine.core import EngineCore, ModelExecutor
from lmscope.engine.loop import EngineLoop
from lmscope.errors import EngineClosedError, EngineDeadError
from lmscope.frontend.input_processor import InputProcessor
from lmscope.frontend.output_processor import OutputProcessor, aborted_output
from lmscope.frontend.parallel_sampling import Child, LiveRequests, child_requests
from lmscope.frontend.stream import Stream
from lmscope.frontend.tokenizer import TokenizerAdapter
from lmscope.gate import Gate
from lmscope.models.free_memory import free_memory_bytes
from lmscope.models.plan import ExecutionPlan, PlanLine, scripted_plan
from lmscope.progress import generate_bar
from lmscope.sampling_params import SamplingParams
from lmscope.scope.questions import Why, why_now
from lmscope.tap import Tap
from lmscope.torch_threads import one_torch_thread, set_torch_threads

if TYPE_CHECKING:
    import torch

    from lmscope.models.early_packing import EarlyPacking

__all__ = ["LLM"]

logger = logging.getLogger(__name__)

# A model without weights has no length of its own; the pool limits it.
_SCRIPTED_MAX_MODEL_LEN = 1 << 20

_numbers = itertools.count(1)


@dataclass(frozen=True)
class _Weights:
    """What several engines can share: a model, or a script in its place."""

    path: str
    tokenizer: TokenizerAdapter | None
    vocab_size: int
    eos_token_id: int | None
    generation_eos_ids: tuple[int, ...]
    num_embeddings: int | None
    module: torch.nn.Module | None
    # to be called before somebody gets the module
    watch_module: Callable[[], None]
    facts: Callable[[EngineOptions], ModelFacts]  # what the settings depend on
    make_executor: Callable[[EngineConfig], ModelExecutor]
    # what runs the model; packs the weights the first time that it is asked with these options
    plan: Callable[[EngineOptions], Callable[[PlanLine], ExecutionPlan]]


class LLM:
    """An inference engine that can be watched at every boundary struct.

    model              "demo", a hub id, a folder with safetensors, or a .gguf file
    tokenizer          the model's own unless given
    num_kv_blocks      size of the KV cache in blocks, block 0 included
    kv_cache_bytes     the same in bytes; without either: 512 MiB or a tenth of the free
                       memory, whichever is less, and on a GPU what gpu_memory_utilization leaves
    max_model_len      most tokens of one request, prompt and output
    max_num_seqs, max_num_batched_tokens   most requests and tokens in one step
    async_scheduling   schedule each step while the one before still runs, on a thread of its
                       own, and work its tokens into text while the next one runs. The tokens
                       are the same; structs come in another order, which engine/core.py gives,
                       and a request that ends by its text or an EOS has one step more in flight,
                       whose token is dropped
    stream_interval    readers of a stream get an output at its first token, at its end, and
                       in between when there are this many new tokens; views see every token
    execute            "model", or "scripted": `script(request_id, position)` says what is
                       sampled, without torch and weights
    threads            torch threads of the engine; without it all cores but one
    exact              weights stay in the dtype; without it, float32 weights that lose nothing
                       which matters are packed in half precision where a CPU is faster so, and
                       `print(llm.plan)` says what runs
    quantization       weights of fewer bits for steps of few rows, with the extra cpu. "gguf": the
                       4- and 8-bit blocks of the GGUF file that the model was loaded from, as
                       they are, for one or two rows; tokens are those of float32. "int8": any
                       model's weights rounded to 8 bits, for one to four rows; approximate
    batch_invariant    tokens and log probabilities are the same bit for bit alone and in any
                       batch, chunked or not, preempted or not, cached or not. For models shaped
                       like Llama, float32 on a CPU and any dtype on a GPU, by the kernels there;
                       slower: docs/decisions/batch_invariant.md
    attention_backend  "triton": the kernels, on CUDA devices from sm_80 on; "torch": everywhere;
                       "auto": the first where it can run, and `print(llm.plan)` says which
    gpu_memory_utilization   part of a GPU's memory that weights, one step and the KV cache may
                       take together, 0.9 unless given; of no effect on a CPU
    enforce_eager      no CUDA graphs for decode steps

    Options are checked before anything is loaded: TypeError for unknown names and wrong
    types, ValueError for values that cannot work. `submit`, `abort` and `tap.on` may be
    called from any thread. Close it, or use it as a context manager, to give the memory
    back.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str = "auto",
        seed: int = 0,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        scheduler_cls: type | None = None,
        async_scheduling: bool = False,
        stream_interval: int = 1,
        engine: str = "thread",
        execute: str = "model",
        script: Callable[[str, int], int | None] | None = None,
        threads: int | None = None,
        exact: bool = False,
        quantization: str | None = None,
        batch_invariant: bool = False,
        attention_backend: str = "auto",
        gpu_memory_utilization: float | None = None,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        **vllm_options: Any,
    ) -> None:
        options = EngineOptions.parse(
            model,
            {
                "dtype": dtype,
                "device": device,
                "seed": seed,
                "block_size": block_size,
                "kv_cache_bytes": kv_cache_bytes,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": max_num_batched_tokens,
                "enable_prefix_caching": enable_prefix_caching,
                "enable_chunked_prefill": enable_chunked_prefill,
                "long_prefill_token_threshold": long_prefill_token_threshold,
                "scheduling_policy": scheduling_policy,
                "scheduler_cls": scheduler_cls,
                "async_scheduling": async_scheduling,
                "stream_interval": stream_interval,
                "engine": engine,
                "execute": execute,
                "script": script,
                "threads": threads,
                "exact": exact,
                "quantization": quantization,
                "batch_invariant": batch_invariant,
                "attention_backend": attention_backend,
                "gpu_memory_utilization": gpu_memory_utilization,
                "enforce_eager": enforce_eager,
                "trust_remote_code": trust_remote_code,
                **({} if num_kv_blocks is None else {"num_kv_blocks": num_kv_blocks}),
                **vllm_options,
            },
        )
        _warn_of_others(options)
        with paused_collection, _threads_for_the_engine(options):
            weights = _load(options, tokenizer)
        self._start(options, weights)

    def _start(self, options: EngineOptions, weights: _Weights) -> None:
        self._options = options
        self._weights = weights
        # Before the free memory is looked at: packed weights take some of it.
        with paused_collection, _threads_for_the_engine(options):
            self._plan = weights.plan(options)
        self.config = resolve(options, weights.facts(options), free_memory_bytes())
        self.model = weights.path
        self.tap = Tap(_info(self.config), self._snapshot, self._run_on_engine)
        self.gate = Gate(
            self.tap,
            is_idle=lambda: self._loop.is_idle(),
            serve=lambda: self._loop.serve_urgent(),
            is_engine_thread=lambda: self._loop.is_engine_thread,
            settle=lambda: self._loop.call(lambda core: core.wait_for_device()),
        )
        self._inputs = InputProcessor(
            weights.tokenizer,
            vocab_size=weights.vocab_size,
            max_model_len=self.config.max_model_len,
            eos_token_id=weights.eos_token_id,
            generation_eos_ids=weights.generation_eos_ids,
            max_pool_tokens=self.config.max_pool_tokens,
            block_size=self.config.block_size,
            num_embeddings=weights.num_embeddings,
        )
        self._outputs = OutputProcessor(weights.tokenizer, self.tap)
        self._live = LiveRequests()
        config, make_executor, tap = self.config, weights.make_executor, self.tap
        self._loop = EngineLoop(
            lambda: EngineCore(
                config, make_executor(config), tap, prepare_device=lambda: _set_threads(config)
            ),
            self._outputs.process,
            self._on_end,
            name=f"lmscope-engine-{next(_numbers)}",
            prepare=lambda: _set_threads(config),
            on_change=lambda: self.gate.wake(),
        )
        _live_engines.add(self)

    # -- generate ------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; one RequestOutput each, in their order.

        prompts           one prompt or a list; a prompt is a text, a list of token ids, or
                          a dict with "prompt" or "prompt_token_ids" and perhaps "cache_salt"
        sampling_params   one for all, or one per prompt
        priority          one number per prompt; smaller runs earlier under "priority"

        A bad prompt raises before any of the call's prompts is queued. KeyboardInterrupt
        aborts what the call started; the engine stays usable.
        """
        items = _as_prompts(prompts)
        return self._run_all(items, sampling_params, use_tqdm, priority, is_chat=False)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        messages           [{"role": "user", "content": "Hi"}, ...]
        template_options   for the tokenizer: add_generation_prompt (True unless given),
                           continue_final_message, chat_template, tools, ...

        ValueError when the model has no chat template.
        """
        tokenizer = self._weights.tokenizer
        if tokenizer is None:
            raise ValueError("this model has no tokenizer, so chat() cannot render messages")
        template_options.setdefault(
            "add_generation_prompt", not template_options.get("continue_final_message", False)
        )
        conversations = (
            messages if messages and not isinstance(messages[0], Mapping) else [messages]
        )
        texts = [
            tokenizer.apply_chat_template(conversation, **template_options)
            for conversation in conversations
        ]
        return self._run_all(texts, sampling_params, use_tqdm, None, is_chat=True)

    def submit(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Stream:
        """Queue one prompt and return at once.

        request_id   counts up from "0" unless given; one that is live already gets "-2"

        Bad prompts and parameters raise here, with the parameter, the value and the limit.
        """
        streams: list[Stream] = []
        try:
            self._submit_all(streams, [prompt], [sampling_params], [priority], [request_id], False)
        except BaseException:
            self._end_quietly(streams)
            raise
        return streams[0]

    def abort(self, request_id: str) -> None:
        """End a request; its blocks are free before the next step. Unknown ids are ignored.

        With n > 1 the id of a stream ends all of its samples, "1_7" only that one.
        """
        self._abort_all([request_id])

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, with a warning, while any is in use.

        reset_running_requests   preempt all that run first; they compute everything again
        """
        self.gate.require_open()

        def reset(core: EngineCore) -> tuple[bool, int]:
            pool = core.scheduler.kv_cache_manager.block_pool
            done = core.reset_prefix_cache(reset_running_requests)
            return done, pool.num_blocks - 1 - pool.num_free_blocks

        # A batch in flight writes into blocks, and brings tokens that would have to be dropped.
        done, num_used = self._loop.call(reset, needs_idle_device=True)
        if not done:
            logger.warning(
                "the prefix cache was not reset, since %d of %d blocks are in use; wait for the "
                "requests that hold them, abort them, or use reset_running_requests=True",
                num_used,
                self.config.num_usable_blocks,
            )
        return done

    def why(self, request_id: str) -> Why:
        """Why a live request runs or waits now, and what would let it run in the next step.

        Works with nobody listening. ValueError for an id that is not live, naming those that
        are; what happened earlier is asked of a recording. While the engine stands at a gate
        inside a step, the answer leaves out the tokens which that step has yet to bring.
        """

        def ask(core: EngineCore) -> tuple[Why | None, list[str]]:
            scheduler = core.scheduler
            return why_now(scheduler, request_id, core.step_number), list(scheduler.requests)

        answer, live = self._loop.call(ask, is_urgent=True)
        if answer is None:
            known = ", ".join(live[:8]) or "none"
            raise ValueError(
                f"request id is {request_id!r}, which is not live; live: {known}; of ended "
                "requests ask a recording: rec.why(request_id)"
            )
        return answer

    def measure_attention(self, *, by_head: bool = False) -> AttentionMeasure:
        """Have each ModelRunnerOutput say how much attention each block receives.

        by_head   also keep it for each layer and head, for `AttentionMeasure.by_head`; of at
                  most five steps a second, the mean is of every step

        Lasts until what this returns is closed. ValueError for a script, which has no
        attention.
        """

        def call(method: str, *args: int) -> Any:
            return self._loop.call(lambda core: core.call_worker(method, *args), is_urgent=True)

        def switch(more: int, more_by_head: int) -> None:
            try:
                call("measure_attention", more, more_by_head)
            except (EngineClosedError, EngineDeadError):
                if more > 0:
                    raise

        return AttentionMeasure(switch, lambda: call("attention_by_head"), by_head)

    # -- life ------------------------------------------------------------------

    @property
    def module(self) -> torch.nn.Module:
        """The transformers model."""
        if self._weights.module is None:
            if self.config.execute == "model":
                _weights_are_gone()
            raise ValueError(f"execute={self.config.execute!r} has no module, only a script")
        self._weights.watch_module()
        return self._weights.module

    @property
    def plan(self) -> ExecutionPlan:
        """What a step runs now, and why; print it."""
        config = self.config
        if self._options.threads is not None:
            why = "as asked"
        else:
            why = f"{num_cores()} cores, of which the notebook keeps one"
        plan = self._plan(PlanLine(str(config.threads), why))
        scheduling = (
            PlanLine("the next step while one runs", "async_scheduling=True")
            if config.async_scheduling
            else PlanLine("a step when the one before is over", "async_scheduling=False")
        )
        device = plan.device
        if config.execute == "model":
            device = PlanLine(config.device, f"device={self._options.device!r}")
        return msgspec.structs.replace(plan, device=device, scheduling=scheduling)

    @property
    def tokenizer(self) -> TokenizerAdapter | None:
        return self._weights.tokenizer

    def like(self, **changes: Any) -> LLM:
        """Another engine over the same weights, with some options changed."""
        other = LLM.__new__(LLM)
        other._start(self._options.replace(**changes), self._weights)
        return other

    def close(self) -> None:
        """End all requests, give the KV cache back and let go of the weights. Twice is fine."""
        self.gate.end()
        self._loop.close()
        _live_engines.discard(self)
        # A notebook's history of outputs may hold this object for ever, but not the weights.
        self._weights = replace(
            self._weights,
            module=None,
            watch_module=lambda: None,
            facts=_weights_are_gone,
            make_executor=_weights_are_gone,
            plan=_weights_are_gone,
        )
        self._plan = _weights_are_gone
        _give_gpu_memory_back(self.config)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<LLM {self.config.model}: {self.config.num_kv_blocks} blocks of "
            f"{self.config.block_size}, {len(self._live)} live requests"
            f"{'' if self._loop.is_alive else ', closed'}>"
        )

    def __str__(self) -> str:
        return self.config.describe()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM owns a thread and memory and cannot be pickled or copied")

    # -- inside ----------------------------------------------------------------

    def _run_all(
        self,
        prompts: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
        is_chat: bool,
    ) -> list[RequestOutput]:
        self.gate.require_open()
        params = _per_prompt("sampling_params", sampling_params, len(prompts))
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise ValueError(
                f"priority has {len(priorities)} entries for {len(prompts)} prompts; "
                "give one for each"
            )
        ids = [None] * len(prompts)
        streams: list[Stream] = []
        try:
            self._submit_all(streams, prompts, params, priorities, ids, is_chat)
            with generate_bar(streams, use_tqdm) as update:
                for stream in streams:
                    while not stream.finished:
                        try:
                            stream.wait(timeout_s=0.1)
                        except TimeoutError:
                            update()
                    update()
        except BaseException:
            # Ctrl-C or a dead engine: what this call started must not go on without it.
            self._end_quietly(streams)
            raise
        return [stream.output for stream in streams]

    def _submit_all(
        self,
        streams: list[Stream],
        prompts: Sequence[Any],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        request_ids: Sequence[str | None],
        is_chat: bool,
    ) -> None:
        """Check all prompts, then queue them together, so that they arrive in one step.

        streams   gets theirs; filled as early as possible, since Ctrl-C may come at any line
        """
        self._require_open()
        ns = [1 if param is None else getattr(param, "n", 1) for param in params]
        ids: list[str] = []
        try:
            for request_id, n in zip(request_ids, ns, strict=True):
                ids.append(self._live.reserve(request_id, n))
            # A view shows the text of each token, so it is worked out only for listeners.
            want_text = self.tap.is_live
            requests = [
                self._inputs.process(
                    prompt,
                    SamplingParams() if param is None else param,
                    request_id=request_id,
                    priority=priority,
                    arrival_time=time.time(),
                    want_text=want_text,
                    add_special_tokens=not is_chat,
                )
                for prompt, param, request_id, priority in zip(
                    prompts, params, ids, priorities, strict=True
                )
            ]
        except BaseException:
            for request_id, n in zip(ids, ns, strict=False):
                self._live.release(request_id, n)
            raise
        streams += [
            Stream(
                request.request_id,
                request.prompt if isinstance(prompt, (str, Mapping)) else None,
                request.prompt_token_ids,
                SamplingParams() if param is None else param,
                abort=self.abort,
                check_wait=self.gate.require_open,
                stream_interval=self.config.stream_interval,
            )
            for request, prompt, param in zip(requests, prompts, params, strict=True)
        ]
        pairs = [
            pair
            for request, stream in zip(requests, streams, strict=True)
            for pair in zip(child_requests(request), self._live.add(stream), strict=True)
        ]
        try:
            self._loop.post(lambda core: self._add(core, pairs))
        except Exception:
            for _, child in pairs:
                self._live.remove(child.request_id)
            raise

    def _add(self, core: EngineCore, pairs: list[tuple[EngineCoreRequest, Child]]) -> None:
        for request, child in pairs:
            if not self._live.holds(child):  # aborted before the engine had seen it
                continue
            self._outputs.add_request(request, child, self._live.remove)
            core.add_request(request)

    def _abort_all(self, request_ids: Sequence[str]) -> None:
        children = self._live.find(request_ids)
        if not children:
            return

        def end(core: EngineCore) -> None:
            ended = self._outputs.abort_requests(children, core.step_number)
            core.abort_requests(ended)
            for child in children:
                if self._live.holds(child):  # the engine has not seen it yet
                    self._live.remove(child.request_id)
                    child.stream.push(aborted_output(child, core.step_number))

        try:
            self._loop.post(end, is_urgent=True)
        except (EngineClosedError, EngineDeadError):
            return  # every request of it has ended already

    def _end_quietly(self, streams: Sequence[Stream]) -> None:
        """Abort what was queued of these, and wait until it is over."""
        ids = [stream.request_id for stream in streams if not stream.finished]
        queued = {child.stream.request_id: child.stream for child in self._live.find(ids)}
        self._abort_all(ids)
        for stream in queued.values():
            try:
                stream.wait(timeout_s=10.0)
            except (TimeoutError, EngineClosedError, EngineDeadError):
                return

    def _on_end(self, error: BaseException | None) -> None:
        """The engine thread ends: nobody may be left waiting. Called on that thread."""
        self.gate.end(error)
        if error is None:
            self._outputs.abort_requests(self._live.find(list(self._live)), step=0)
            gone: Exception = EngineClosedError("the engine was closed; load a new one")
        else:
            logger.error("the engine died", exc_info=error)
            gone = EngineDeadError.of(error)
        for child in self._live.clear():
            child.stream.fail(gone)

    def _require_open(self) -> None:
        if not self._loop.is_alive:
            self._loop.post(lambda core: None).result()  # raises what ended it

    def _run_on_engine(self, function: Callable[[], Any]) -> Any:
        return self._loop.call(lambda core: function(), is_urgent=True)

    def _snapshot(self) -> EngineSnapshot:
        """The engine's state; called on its thread, between two structs."""

        def take(core: EngineCore) -> EngineSnapshot:
            blocks, free_queue = core.snapshot_blocks()
            return EngineSnapshot(
                info=self.tap.info,
                step=core.step_number,
                time=time.monotonic(),
                blocks=blocks,
                free_queue=free_queue,
                requests=core.snapshot_requests(self._outputs.text_of),
            )

        return self._loop.call(take, is_urgent=True)


_live_engines: weakref.WeakSet[LLM] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that is inside torch when the interpreter goes away crashes it.
    for engine in list(_live_engines):
        engine.close()


def _warn_of_others(options: EngineOptions) -> None:
    """Say what open engines hold, before the memory for another model is taken."""
    if options.execute != "model":
        return
    for engine in list(_live_engines):
        module = engine._weights.module
        if module is not None:
            weight_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
            kv_bytes = engine.config.num_kv_blocks * engine.config.kv_block_bytes
            logger.warning(
                "another engine is open and holds %.0f MB of weights and %.0f MB of KV cache: "
                "%r; close() it if it is not needed, or share its weights with like()",
                weight_bytes / 1e6,
                kv_bytes / 1e6,
                engine,
            )


def _weights_are_gone(*_: object) -> NoReturn:
    raise EngineClosedError(
        "the engine was closed and has let go of its weights; load a new one with LLM(...)"
    )


def _load(options: EngineOptions, tokenizer: Any) -> _Weights:
    if options.execute == "scripted":
        return _load_script(options, tokenizer)
    early = _begin_packing(options)
    try:
        return _load_model(options, tokenizer, early)
    finally:
        if early is not None:
            early.close()


def _load_model(options: EngineOptions, tokenizer: Any, early: EarlyPacking | None) -> _Weights:
    # Here and not above: a scripted engine must not need torch.
    from lmscope.execute.executor import UniProcExecutor
    from lmscope.execute.gpu_memory import gpu_room
    from lmscope.models.attention_backend import AttentionBackend, choose_attention_backend
    from lmscope.models.loader import load_model

    is_object = tokenizer is not None and not isinstance(tokenizer, (str, Path))
    loaded = load_model(
        options.model,
        tokenizer=_adapt(tokenizer) if is_object else tokenizer,
        load_tokenizer=lambda place: _load_tokenizer(place, options.trust_remote_code),
        dtype=options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        early=early,
    )

    embeddings: Any = cast("Any", loaded.module).get_input_embeddings()

    def backend(given: EngineOptions) -> AttentionBackend:
        return choose_attention_backend(
            given.attention_backend,
            device=loaded.device,
            dtype=loaded.dtype,
            head_size=loaded.head_size,
            num_query_heads=loaded.num_query_heads,
            num_kv_heads=loaded.num_kv_heads,
            batch_invariant=given.batch_invariant,
        )

    def facts(given: EngineOptions) -> ModelFacts:
        chosen = backend(given)
        chosen.warn()
        on_gpu = loaded.device.type == "cuda"
        room = gpu_room(given, loaded, chosen.name) if on_gpu else None
        return ModelFacts(
            max_model_len=loaded.max_model_len,
            kv_block_bytes=loaded.kv_block_bytes(given.block_size),
            kv_formula=loaded.kv_formula(given.block_size),
            device=str(loaded.device.type),
            dtype=str(loaded.dtype).removeprefix("torch."),
            attention_backend=chosen.name,
            kv_cache_bytes=None if room is None else room.num_bytes,
            kv_cache_why="" if room is None else room.why,
        )

    def plan(given: EngineOptions) -> Callable[[PlanLine], ExecutionPlan]:
        chosen = backend(given)
        body = loaded.body(
            exact=given.exact,
            quantization=given.quantization,
            batch_invariant=given.batch_invariant,
            attention_backend=chosen.name,
        )
        attention = chosen.line() if chosen.name == "triton" else None
        return lambda threads: body.plan(threads, attention)

    return _Weights(
        path=loaded.path,
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.vocab_size,
        eos_token_id=loaded.eos_token_id,
        generation_eos_ids=tuple(loaded.eos_token_ids),
        num_embeddings=embeddings.num_embeddings,
        module=loaded.module,
        watch_module=loaded.watch_weights,
        facts=facts,
        make_executor=lambda config: UniProcExecutor(config, loaded),
        plan=plan,
    )


def _begin_packing(options: EngineOptions) -> EarlyPacking | None:
    """What packs the weights while transformers is imported; None: they are packed after that."""
    if options.exact or options.quantization is not None or options.batch_invariant:
        return None
    import torch

    from lmscope.models.early_packing import begin_packing
    from lmscope.models.linear import choose_linear_method
    from lmscope.models.model_source import folder_at_hand

    folder = folder_at_hand(options.model)
    is_on_cpu = options.device == "cpu" or (
        options.device == "auto" and not torch.cuda.is_available()
    )
    if folder is None or not is_on_cpu or options.dtype not in ("auto", "float32"):
        return None
    chosen = choose_linear_method(
        exact=False, quantization=None, dtype=torch.float32, device=torch.device("cpu")
    )
    return begin_packing(folder, chosen)


def _load_script(options: EngineOptions, tokenizer: Any) -> _Weights:
    from lmscope.execute.scripted import ScriptedExecutor
    from lmscope.testing import byte_tokenizer

    adapter = byte_tokenizer() if tokenizer is None else _adapt(tokenizer)
    eos_token_id = adapter.eos_token_id
    script = options.script
    assert script is not None
    return _Weights(
        path=options.model,
        tokenizer=adapter,
        vocab_size=adapter.vocab_size,
        eos_token_id=eos_token_id,
        generation_eos_ids=(),
        num_embeddings=None,
        module=None,
        watch_module=lambda: None,
        facts=lambda _: ModelFacts(max_model_len=_SCRIPTED_MAX_MODEL_LEN, kv_block_bytes=0),
        make_executor=lambda config: ScriptedExecutor(
            script, eos_token_id if eos_token_id is not None else 0
        ),
        plan=lambda _: scripted_plan,
    )


def _adapt(tokenizer: Any) -> TokenizerAdapter:
    if isinstance(tokenizer, TokenizerAdapter):
        return tokenizer
    if isinstance(tokenizer, (str, Path)):
        return TokenizerAdapter.from_folder(tokenizer)
    return TokenizerAdapter.from_transformers(tokenizer)


def _load_tokenizer(place: str, trust_remote_code: bool) -> TokenizerAdapter:
    """The tokenizer of a folder or of a hub id."""
    if Path(place).is_dir():
        return TokenizerAdapter.from_folder(place, trust_remote_code=trust_remote_code)
    from transformers import AutoTokenizer

    return TokenizerAdapter.from_transformers(
        AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    )


def _info(config: EngineConfig) -> EngineInfo:
    has_model = config.execute == "model"
    return EngineInfo(
        model=config.model,
        block_size=config.block_size,
        num_blocks=config.num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        wall_time=time.time(),
        monotonic_time=time.monotonic(),
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        device=config.device if has_model else "",
        attention_backend=config.attention_backend if has_model else "",
        async_scheduling=config.async_scheduling,
    )


def _set_threads(config: EngineConfig) -> None:
    """Leave a core to the notebook. Called on the thread that runs the model, for that one."""
    if config.execute == "model":
        set_torch_threads(config.threads)


def _threads_for_the_engine(options: EngineOptions) -> AbstractContextManager[None]:
    """What is computed inside, on the user's thread, makes no threads beside the engine's."""
    return one_torch_thread() if options.execute == "model" else nullcontext()


def _give_gpu_memory_back(config: EngineConfig) -> None:
    """Torch keeps what was freed on a GPU for itself, where no other process can have it."""
    if config.device != "cuda":
        return
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # one prompt, given as token ids
    return items


def _per_prompt(name: str, given: Any, count: int) -> list[Any]:
    if given is None or isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence):
        raise TypeError(f"{name} is {given!r}; it takes SamplingParams, or one for each prompt")
    if len(given) != count:
        raise ValueError(
            f"{name} has {len(given)} entries for {count} prompts; give one, or one for each"
        )
    return list(given)
