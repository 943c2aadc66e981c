"""The progress bar of `generate`: finished prompts and tokens per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lmscope.frontend.stream import Stream

__all__ = ["generate_bar"]

# Between two looks at the streams, which costs something for each of them.
_INTERVAL_S = 0.2


@contextmanager
def generate_bar(streams: Sequence[Stream], is_shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over streams that run; what it gives is to be called as often as one likes.

    It counts samples, n for each stream. In a notebook it is a widget while it runs and leaves
    one line of text, which is what a saved notebook shows and what leaves no widget behind.
    With is_shown=False nothing is imported and nothing is written.
    """
    if not is_shown or not streams:
        yield lambda: None
        return
    # Chooses between a widget and text, and falls back to text without a front end for widgets.
    from tqdm.auto import tqdm

    start = time.monotonic()
    total = sum(stream.sampling_params.n for stream in streams)
    bar: Any = tqdm(total=total, desc="Processed prompts", unit="prompt", **_options(tqdm))
    handle = _display(bar)
    counter = _Counter(streams)
    last = float("-inf")

    def update(is_last: bool = False) -> None:
        nonlocal last
        now = time.monotonic()
        if not is_last and now - last < _INTERVAL_S:
            return
        last = now
        finished, num_tokens = counter.count()
        rate = num_tokens / max(now - start, 1e-9)
        bar.set_postfix_str(f"{num_tokens} tokens, {rate:.1f} tokens/s", refresh=False)
        bar.n = finished
        bar.refresh()

    try:
        yield update
    finally:
        update(is_last=True)
        text = str(bar)
        bar.close()
        if handle is not None:
            handle.update({"text/plain": text}, raw=True)
            _close_widgets(bar.container)


class _Counter:
    """Finished samples and tokens of all; a stream that has finished is counted once."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._running = list(streams)
        self._finished = 0
        self._tokens = 0

    def count(self) -> tuple[int, int]:
        running, finished, tokens = [], 0, 0
        for stream in self._running:
            # Asked first: what finishes meanwhile is counted again the next time.
            is_finished = stream.finished
            num_finished, num_tokens = stream.num_finished, stream.num_tokens
            if is_finished:
                self._finished += num_finished
                self._tokens += num_tokens
            else:
                running.append(stream)
                finished += num_finished
                tokens += num_tokens
        self._running = running
        return self._finished + finished, self._tokens + tokens


def _options(tqdm: Any) -> dict[str, Any]:
    """A bar that is a widget is displayed by us, so that its output can be changed later."""
    return {"display": False} if _is_widget(tqdm) else {}


def _is_widget(tqdm: Any) -> bool:
    return any(base.__name__ == "tqdm_notebook" for base in tqdm.__mro__)


def _display(bar: Any) -> Any:
    """Show a bar that is a widget; returns the handle of its output, None for one of text."""
    if not hasattr(bar, "container"):
        return None
    from IPython.display import display

    return display(bar.container, display_id=True)


def _close_widgets(container: Any) -> None:
    for widget in (*container.children, container):
        for part in ("layout", "style"):
            if hasattr(widget, part):
                getattr(widget, part).close()
        widget.close()
