"""Executor: how the engine reaches the workers that run the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from lmscope.boundary import ModelRunnerOutput, SchedulerOutput
from lmscope.config import EngineConfig
from lmscope.execute.pending_output import PendingOutput
from lmscope.execute.worker import Worker
from lmscope.models.loader import LoadedModel

__all__ = ["Executor", "UniProcExecutor"]


class Executor(Protocol):
    """What an engine asks of its workers. Everything else is built on collective_rpc."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker, one result each.

        method    its name, or a function that gets the worker as its first argument
        """
        ...

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block of the KV cache, over all layers."""
        ...

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        """Allocate keys and values of `num_blocks` blocks, block 0 included."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model. None: the result stays with the workers until sample_tokens."""
        ...

    def sample_tokens(self, grammar_output: None = None) -> ModelRunnerOutput | PendingOutput:
        """The tokens of the step that execute_model ran, or what they will come from."""
        ...

    def shutdown(self) -> None:
        """Give the memory of the KV cache back and let go of the model."""
        ...


class UniProcExecutor:
    """One worker in this process, called directly, on the thread of the caller.

    Allocates the KV cache that the config asks for.
    """

    def __init__(self, config: EngineConfig, loaded: LoadedModel) -> None:
        self._worker = Worker(config, loaded)
        self.initialize_kv_cache(config.num_kv_blocks, config.block_size)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As Executor says; a direct call cannot be cut short, so timeout_s has no effect."""
        if callable(method):
            return [method(self._worker, *args, **(kwargs or {}))]
        return [getattr(self._worker, method)(*args, **(kwargs or {}))]

    def kv_block_bytes(self, block_size: int) -> int:
        return self._worker.kv_block_bytes(block_size)

    def initialize_kv_cache(self, num_blocks: int, block_size: int) -> None:
        self._worker.initialize_kv_cache(num_blocks, block_size)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        return self._worker.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: None = None) -> ModelRunnerOutput | PendingOutput:
        return self._worker.sample_tokens(grammar_output)

    def shutdown(self) -> None:
        self._worker.shutdown()
