"""AttentionMeasure: for as long as it is open, the engine says what each block is attended to."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lmscope.models.attention_mass import ByHead

__all__ = ["AttentionMeasure"]


class AttentionMeasure:
    """Made by `LLM.measure_attention`; close it, or use it as a context manager.

    While any is open, each ModelRunnerOutput carries `attention_mass`. The engine then reads
    the keys of every request once more in each step, so it is off unless somebody looks. What
    each layer and head gives is megabytes: at most five steps a second keep it.

    step    the one that `by_head` gave last; 0 before
    """

    def __init__(
        self,
        switch: Callable[[int, int], Any],
        read: Callable[[], ByHead],
        has_heads: bool,
    ) -> None:
        self._switch = switch
        self._read = read
        self._has_heads = has_heads
        self.is_open = True
        self.step = 0
        switch(1, int(has_heads))

    def by_head(self) -> dict[str, NDArray[np.float32]]:
        """Of the newest step that kept it, by request: [layers, H, blocks of its table] float32.

        Each row over the blocks sums to 1. A step keeps it when none has within the last 0.2 s;
        `step` says then which one it was. Empty before the first.
        Only with `measure_attention(by_head=True)`; ValueError otherwise, and when closed.
        """
        if not self._has_heads:
            raise ValueError(
                "by_head is False, so only the mean over heads is kept; ask with "
                "measure_attention(by_head=True)"
            )
        if not self.is_open:
            raise ValueError("this measurement is closed; open another with measure_attention")
        self.step, shares = self._read()
        return dict(shares)

    def close(self) -> None:
        """Measure no more, unless another one is open. Twice is fine."""
        if self.is_open:
            self.is_open = False
            self._switch(-1, -int(self._has_heads))

    def __enter__(self) -> AttentionMeasure:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
