"""Worker: one device, the model on it, and what runs it."""

from __future__ import annotations

import gc

import torch

from lmscope.boundary import ModelRunnerOutput, SchedulerOutput
from lmscope.config import EngineConfig
from lmscope.errors import EngineClosedError
from lmscope.execute.model_runner import ModelRunner
from lmscope.execute.pending_output import PendingOutput
from lmscope.models.attention_mass import ByHead
from lmscope.models.loader import LoadedModel

__all__ = ["Worker"]


class Worker:
    """Runs steps once it has a KV cache; an executor calls it by method name."""

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._config = config
        self._loaded: LoadedModel | None = loaded
        self._runner: ModelRunner | None = None

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the KV cache, over all layers."""
        return self._require_loaded().kv_block_bytes(block_size)

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate keys and values of `num_blocks` blocks, block 0 included."""
        config = self._config
        self._runner = None  # the old cache goes before the new one comes
        loaded = self._require_loaded()
        body = loaded.body(
            exact=config.exact,
            quantization=config.quantization,
            batch_invariant=config.batch_invariant,
            attention_backend=config.attention_backend,
        )
        if config.attention_backend == "triton":
            # Here, not above: a start on a CPU need not wait for the kernels.
            from lmscope.execute.device_runner import DeviceRunner

            self._runner = DeviceRunner(config, loaded, body, num_blocks, block_size)
            return
        self._runner = ModelRunner(
            loaded,
            num_blocks,
            block_size,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.seed,
            config.max_model_len,
            body,
            check_batches=config.check_batches,
        )

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self._require_runner().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: None = None) -> ModelRunnerOutput | PendingOutput:
        return self._require_runner().sample_tokens(grammar_output)

    def measure_attention(self, more: int, more_by_head: int) -> None:
        self._require_runner().measure_attention(more, more_by_head)

    def attention_by_head(self) -> ByHead:
        """Of the newest step that kept it."""
        return self._require_runner().attention_by_head

    def shutdown(self) -> None:
        """Let go of the model and its KV cache; twice is fine."""
        device = None if self._loaded is None else self._loaded.device
        is_on_gpu = device is not None and device.type == "cuda"
        try:
            if is_on_gpu:
                # What it was given may still run, graphs among it, which must not go meanwhile.
                torch.cuda.synchronize(device)
        finally:
            self._runner = None
            self._loaded = None
        if is_on_gpu:
            # A runner and what it captured may refer to each other.
            gc.collect()
            torch.cuda.empty_cache()

    def _require_loaded(self) -> LoadedModel:
        if self._loaded is None:
            raise EngineClosedError("the worker was shut down; load the model again")
        return self._loaded

    def _require_runner(self) -> ModelRunner:
        self._require_loaded()
        assert self._runner is not None, "initialize_kv_cache comes first"
        return self._runner
