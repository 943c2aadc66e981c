"""The engine's settings: what a user gives, checked once, and what is made of it.

`EngineOptions` is what `LLM(...)` was called with. `resolve` turns it into an
`EngineConfig`, in which nothing is open any more, once the model is known. Every message
has the value, the limit and what to do next.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from lmscope.checks import nearest

__all__ = [
    "EngineConfig",
    "EngineOptions",
    "ModelFacts",
    "cache_folder",
    "default_threads",
    "is_checking",
    "num_cores",
    "resolve",
]

logger = logging.getLogger(__name__)

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
DEFAULT_KV_CACHE_BYTES = 512 << 20
DEFAULT_GPU_MEMORY_UTILIZATION = 0.9
# The scripted model keeps no keys and values, so only the number of blocks matters.
DEFAULT_SCRIPTED_BLOCKS = 1024
MAX_DEFAULT_THREADS = 16

# Options of vLLM that change nothing here, with the values that are accepted.
_WITHOUT_MEANING: dict[str, tuple[object, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "swap_space": (0, 4),
    "cpu_offload_gb": (0,),
    "disable_log_stats": (True, False),
    "disable_custom_all_reduce": (True, False),
    "enable_lora": (False,),
    "skip_tokenizer_init": (False,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors"),
}


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for; None means that lmscope chooses."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    scheduler_cls: type | None = None
    async_scheduling: bool = False
    stream_interval: int = 1
    engine: str = "thread"
    execute: str = "model"
    script: Callable[[str, int], int | None] | None = None
    threads: int | None = None
    exact: bool = False
    quantization: str | None = None
    batch_invariant: bool = False
    attention_backend: str = "auto"
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    trust_remote_code: bool = False

    @classmethod
    def parse(cls, model: str | Path, options: Mapping[str, Any]) -> EngineOptions:
        """Check what `LLM(model, **options)` was given.

        TypeError: wrong type or an unknown name, with the nearest known one.
        ValueError: out of range, contradictory, or not available.
        """
        given = dict(options)
        if "num_gpu_blocks_override" in given:
            given.setdefault("num_kv_blocks", given.pop("num_gpu_blocks_override"))
        for name in [name for name in given if name in _WITHOUT_MEANING]:
            _accept_without_meaning(name, given.pop(name))
        for name in given:
            if name not in cls.__struct_fields__:
                raise TypeError(f"LLM has no option {name}; {nearest(name, cls.__struct_fields__)}")
        parsed = cls(model=str(model), **given)
        parsed._check()
        return parsed

    def replace(self, **changes: Any) -> EngineOptions:
        """A copy with some options changed, checked like new ones."""
        given = {name: getattr(self, name) for name in self.__struct_fields__ if name != "model"}
        return EngineOptions.parse(self.model, {**given, **changes})

    def _check(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; it takes an integer")
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}{_WHY[name]}")
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(
                    f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}"
                )
        for name in (
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "async_scheduling",
            "exact",
            "batch_invariant",
            "enforce_eager",
            "trust_remote_code",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it takes True or False")
        if self.attention_backend in _NOT_BUILT_BACKENDS:
            raise ValueError(
                f"attention_backend is {self.attention_backend!r}, which is not available in this "
                "version: it says nothing of what each block is attended to; use 'triton' on a "
                "CUDA device, or 'auto'"
            )
        if self.attention_backend not in _BACKENDS:
            raise ValueError(
                f"attention_backend is {self.attention_backend!r}; "
                f"{nearest(self.attention_backend, _BACKENDS)}"
            )
        part = self.gpu_memory_utilization
        if part is not None:
            if isinstance(part, bool) or not isinstance(part, (int, float)):
                raise TypeError(f"gpu_memory_utilization is {part!r}; it takes a number")
            if not 0 < part <= 1:
                raise ValueError(
                    f"gpu_memory_utilization is {part}; it must be above 0 and at most 1, the "
                    "part of the GPU's memory that this engine and all others on it may take"
                )
        for name, (value, instead) in _NOT_BUILT.items():
            if getattr(self, name) == value:
                raise ValueError(
                    f"{name}={value!r} is not available in this version; use {name}={instead!r}"
                )
        if self.quantization is not None and not isinstance(self.quantization, str):
            raise TypeError(f"quantization is {self.quantization!r}; it takes a name or None")
        if self.exact and self.quantization is not None:
            raise ValueError(
                f"exact is True and quantization is {self.quantization!r}, which is not exact; "
                "give one of them"
            )
        if self.batch_invariant and self.quantization is not None:
            raise ValueError(
                f"batch_invariant is True and quantization is {self.quantization!r}, whose loops "
                "change with the number of requests; give one of them"
            )
        if self.scheduler_cls is not None:
            raise ValueError(
                "scheduler_cls is not available in this version; leave it out and choose with "
                "scheduling_policy='fcfs' or 'priority'"
            )
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"num_kv_blocks is {self.num_kv_blocks} and kv_cache_bytes is "
                f"{self.kv_cache_bytes}; they say the same thing twice, so give one of them"
            )
        if self.execute == "scripted" and not callable(self.script):
            raise TypeError(
                f"script is {self.script!r}; execute='scripted' takes a function "
                "(request_id, position) -> token id"
            )
        if self.execute != "scripted" and self.script is not None:
            raise ValueError("script is given with execute='model'; use execute='scripted'")


_LEAST = {
    "seed": 0,
    "block_size": 1,
    "num_kv_blocks": 2,
    "kv_cache_bytes": 1,
    "max_model_len": 1,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "stream_interval": 1,
    "threads": 1,
}
_WHY = dict.fromkeys(_LEAST, "")
_WHY["num_kv_blocks"] = ", since block 0 is reserved and never handed out"
_ALLOWED = {
    "scheduling_policy": ("fcfs", "priority"),
    "engine": ("thread", "process"),
    "execute": ("model", "scripted", "simulated"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
}
_NOT_BUILT: dict[str, tuple[object, object]] = {
    "engine": ("process", "thread"),
    "execute": ("simulated", "scripted"),
}
_BACKENDS = ("auto", "torch", "triton")
_NOT_BUILT_BACKENDS = ("flash_attn", "flashinfer")


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the settings depend on.

    kv_block_bytes   bytes of one block over all layers; 0 for a model without a KV cache
    kv_cache_bytes   what a GPU has left for the KV cache; None: what is free is the system's, of
                     which a part is taken
    kv_cache_why     how that was found
    """

    max_model_len: int
    kv_block_bytes: int
    kv_formula: str = ""
    device: str = "cpu"
    # of the weights, "float32" for example; "" where there are none
    dtype: str = ""
    attention_backend: str = "torch"
    kv_cache_bytes: int | None = None
    kv_cache_why: str = ""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings in force. num_kv_blocks counts block 0, which is never handed out."""

    model: str
    dtype: str
    device: str
    seed: int
    block_size: int
    num_kv_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: str
    async_scheduling: bool
    engine: str
    execute: str
    threads: int
    kv_block_bytes: int
    kv_formula: str = ""
    # new tokens that make an output for a reader of a stream
    stream_interval: int = 1
    # weights multiplied as F.linear does, in the dtype above
    exact: bool = False
    quantization: str | None = None
    # a token has the same bits alone and in any batch
    batch_invariant: bool = False
    # "torch" or "triton"
    attention_backend: str = "torch"
    # no CUDA graphs
    enforce_eager: bool = False
    # every batch is checked before it is launched: LMSCOPE_CHECK=1
    check_batches: bool = False

    @property
    def num_usable_blocks(self) -> int:
        return self.num_kv_blocks - 1

    @property
    def max_pool_tokens(self) -> int:
        """Tokens whose keys and values fit in the pool at once."""
        return self.num_usable_blocks * self.block_size

    def describe(self) -> str:
        """The settings in a few lines, as `print(llm)` shows them."""
        kv_cache = f"{self.num_kv_blocks} blocks of {self.block_size} tokens (block 0 reserved)"
        if self.kv_block_bytes:
            mib = self.num_kv_blocks * self.kv_block_bytes / (1 << 20)
            kv_cache += f", {mib:.1f} MiB = {self.num_kv_blocks} x {self.kv_formula}"
        caching = "on" if self.enable_prefix_caching else "off"
        chunks = "on" if self.enable_chunked_prefill else "off"
        overlap = "on" if self.async_scheduling else "off"
        has_model = self.execute == "model"
        return "\n".join(
            (
                f"LLM {self.model}  ({self.execute}, {self.device}, {self.dtype or 'no weights'}, "
                f"seed {self.seed}, {self.threads} {'thread' if self.threads == 1 else 'threads'})",
                f"  KV cache   {kv_cache}",
                f"  limits     {self.max_model_len} tokens a request, {self.max_num_seqs} "
                f"requests and {self.max_num_batched_tokens} tokens a step",
                f"  scheduler  {self.scheduling_policy}, prefix caching {caching}, "
                f"chunked prefill {chunks}, long prefill threshold "
                f"{self.long_prefill_token_threshold or 'off'}, async scheduling {overlap}",
                *([f"  attention  {self.attention_backend} back end"] if has_model else ()),
            )
        )


def resolve(options: EngineOptions, facts: ModelFacts, free_bytes: int) -> EngineConfig:
    """Fill in what the user left open.

    free_bytes   memory that is free now on the device of the KV cache

    ValueError when the settings cannot work: a budget below max_num_seqs, chunked prefill
    off with a budget below max_model_len, a KV cache below one block.
    """
    if facts.device == "cpu":
        for name in ("gpu_memory_utilization", "enforce_eager"):
            if getattr(options, name):
                logger.info("%s=%r has no effect on a CPU", name, getattr(options, name))
    num_kv_blocks = options.num_kv_blocks or _num_blocks(options, facts, free_bytes)
    pool_tokens = (num_kv_blocks - 1) * options.block_size
    max_model_len = options.max_model_len
    if max_model_len is None:
        max_model_len = min(facts.max_model_len, pool_tokens)
        if max_model_len < facts.max_model_len:
            logger.info(
                "max_model_len is %d, what the KV cache holds; the model allows %d",
                max_model_len,
                facts.max_model_len,
            )
    elif max_model_len > facts.max_model_len:
        raise ValueError(
            f"max_model_len is {max_model_len}, the model was made for {facts.max_model_len}; "
            f"use max_model_len={facts.max_model_len} or less"
        )
    budget = options.max_num_batched_tokens
    max_num_seqs = options.max_num_seqs
    if budget is None:
        budget = DEFAULT_MAX_NUM_BATCHED_TOKENS
        if not options.enable_chunked_prefill:
            budget = max(budget, max_model_len)
    if max_num_seqs is None:
        max_num_seqs = min(DEFAULT_MAX_NUM_SEQS[facts.device], budget)
    if budget < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, max_num_seqs is {max_num_seqs}; each running "
            "request needs a token in each step, so the first must not be smaller"
        )
    if not options.enable_chunked_prefill and budget < max_model_len:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, max_model_len is {max_model_len}, and "
            "enable_chunked_prefill is False; a longer prompt would wait for ever, so raise "
            f"max_num_batched_tokens to {max_model_len} or leave chunked prefill on"
        )
    return EngineConfig(
        model=options.model,
        dtype=facts.dtype,
        device=facts.device,
        seed=options.seed,
        block_size=options.block_size,
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=options.enable_prefix_caching,
        enable_chunked_prefill=options.enable_chunked_prefill,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        scheduling_policy=options.scheduling_policy,
        async_scheduling=options.async_scheduling,
        stream_interval=options.stream_interval,
        engine=options.engine,
        execute=options.execute,
        threads=options.threads or default_threads(),
        exact=options.exact,
        quantization=options.quantization,
        batch_invariant=options.batch_invariant,
        attention_backend=facts.attention_backend,
        enforce_eager=options.enforce_eager,
        check_batches=is_checking(),
        kv_block_bytes=facts.kv_block_bytes,
        kv_formula=facts.kv_formula,
    )


def default_threads() -> int:
    """Torch threads of an engine unless it is told: a core less than there are.

    The notebook needs a core, and threads that wait for one another on a busy core take many
    times as long as one. Two threads of one core share what computes, so they count once; more
    than MAX_DEFAULT_THREADS gain nothing on small models. OMP_NUM_THREADS is a limit.
    """
    limit = os.environ.get("OMP_NUM_THREADS", "")
    most = int(limit) if limit.isdecimal() and int(limit) else MAX_DEFAULT_THREADS
    return max(1, min(num_cores() - 1, most, MAX_DEFAULT_THREADS))


def num_cores() -> int:
    """Cores that this process may run on; the hardware threads of one core count once."""
    count = os.cpu_count() or 1
    try:
        allowed = sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return count
    siblings = set()
    for number in allowed:
        file = Path(f"/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list")
        try:
            siblings.add(file.read_text())
        except OSError:
            siblings.add(str(number))
    return min(count, len(siblings))


def is_checking() -> bool:
    """Whether batches are checked before they are launched; LMSCOPE_CHECK=1 says so.

    An index beyond the pool is then an error with the request, and not an illegal access.
    """
    return os.environ.get("LMSCOPE_CHECK", "") == "1"


def are_gpus_hidden() -> bool:
    """Whether the user keeps GPUs from this process, by an empty CUDA_VISIBLE_DEVICES."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def cache_folder() -> Path:
    """Where lmscope keeps the demo model: LMSCOPE_CACHE, or the system's place for caches."""
    given = os.environ.get("LMSCOPE_CACHE")
    if given:
        return Path(given)
    # Here, not above: models from a folder need no cache, and a bare machine has no such package.
    import platformdirs

    return Path(platformdirs.user_cache_dir("lmscope"))


def _num_blocks(options: EngineOptions, facts: ModelFacts, free_bytes: int) -> int:
    if not facts.kv_block_bytes:
        return DEFAULT_SCRIPTED_BLOCKS
    cache_bytes = options.kv_cache_bytes
    asked = f"kv_cache_bytes is {cache_bytes}"
    if cache_bytes is None and facts.kv_cache_bytes is not None:
        cache_bytes, asked = facts.kv_cache_bytes, facts.kv_cache_why
    if cache_bytes is None:
        cache_bytes = min(DEFAULT_KV_CACHE_BYTES, free_bytes // 10)
        asked = f"the free memory is {free_bytes} bytes, a tenth of it {cache_bytes}"
    num_blocks = cache_bytes // facts.kv_block_bytes
    if num_blocks < 2:
        size, length = options.block_size, options.max_model_len or facts.max_model_len
        needed = -(-length // size) + 1
        raise ValueError(
            f"{asked}, one block takes {facts.kv_formula} = {facts.kv_block_bytes} bytes and "
            f"block 0 is reserved; give kv_cache_bytes={2 * facts.kv_block_bytes} or more, which "
            f"serves requests of {size} tokens (one of {length} tokens needs {needed} blocks, "
            f"{needed * facts.kv_block_bytes} bytes), or free some memory"
        )
    return num_blocks


def _accept_without_meaning(name: str, value: object) -> None:
    allowed = _WITHOUT_MEANING[name]
    if value not in allowed:
        raise ValueError(
            f"{name} is {value!r}, which lmscope cannot do; leave it out "
            f"(accepted and without effect: {', '.join(map(repr, allowed))})"
        )
    logger.info("%s=%r has no effect in lmscope", name, value)
