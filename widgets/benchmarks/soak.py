"""Many requests with two views open: what stays behind.

    python widgets/benchmarks/soak.py            6,000 requests, about a quarter of a minute
    python widgets/benchmarks/soak.py 1000 300   fewer, and the first look after 300

The engine says what a script tells it, so the time goes into the stream and the views. The
pages are not there; what stands for them answers each frame as a page would. It fails when
the resident memory at the end is more than 5 % above that at the first look, or when there
are more widget models or listeners.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Any

import comm
import ipywidgets.widgets.widget as models
from comm.base_comm import BaseComm
from lmscope_widgets.dashboard import Dashboard

from lmscope import LLM, SamplingParams

MOST_GROWTH = 0.05
_WAVE = 50


@dataclass(frozen=True)
class Look:
    """What there is after some requests.

    resident_bytes   of this process
    models           live widget models
    listeners        subscriptions at the engine's tap
    frames           that the pages have got so far
    """

    requests: int
    resident_bytes: int
    models: int
    listeners: int
    frames: int


class Page(BaseComm):
    """Stands for a page: it answers every frame, and counts them."""

    views: dict[str, Dashboard] = {}  # noqa: RUF012  # emptied by `soak`
    frames = 0

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any
    ) -> None:
        content = data.get("content") if isinstance(data, dict) else None
        if isinstance(content, dict) and content.get("k") == "packed":
            content = json.loads(zlib.decompress(buffers[0]))
        if not isinstance(content, dict) or content.get("k") not in ("full", "delta"):
            return
        Page.frames += 1
        view = Page.views.get(self.comm_id)
        if view is not None:
            tell(view, {"k": "ack", "seq": content["seq"], "epoch": content["epoch"]})


def soak(num_requests: int, first_look: int) -> tuple[Look, Look]:
    """Run the requests; returns how it stands after the first ones and at the end."""
    Page.views, Page.frames = {}, 0
    create, comm.create_comm = comm.create_comm, lambda **options: Page(**options)
    try:
        with LLM(
            "scripted",
            execute="scripted",
            script=lambda request_id, position: 97 + (hash(request_id) + position) % 26,
            block_size=4,
            num_kv_blocks=512,
            max_num_seqs=16,
            max_num_batched_tokens=128,
        ) as engine:
            views = [Dashboard(engine, rate_hz=20), Dashboard(engine, rate_hz=5)]
            for view in views:
                Page.views[view.comm.comm_id] = view
                tell(view, {"k": "ready"})
            looks = []
            for count in range(0, num_requests, _WAVE):
                _run_wave(engine, count, min(_WAVE, num_requests - count))
                for view in views:
                    # A script is faster than a view; what waits to be folded is no leak.
                    assert view.is_idle
                done = count + _WAVE
                if (done >= first_look and not looks) or done >= num_requests:
                    looks.append(_look(engine, done))
            for view in views:
                view.close()
    finally:
        comm.create_comm = create
        Page.views = {}
    return looks[0], looks[-1]


def tell(view: Dashboard, content: dict[str, Any]) -> None:
    """Deliver a message as the front end does."""
    data = {"method": "custom", "content": content}
    view._handle_msg({"content": {"data": data}, "buffers": []})


def _run_wave(engine: LLM, start: int, count: int) -> None:
    params = SamplingParams(max_tokens=12)
    # The tokenizer keeps the last 10,000 texts that it has seen, and that is no leak either: all
    # prompts have been there before the first look.
    prompts = [
        f"Conversation {number % 5}, the beginning that it shares. Question {number % 250}?"
        for number in range(start, start + count)
    ]
    for stream in [engine.submit(prompt, params) for prompt in prompts]:
        stream.wait(120)


def _look(engine: LLM, requests: int) -> Look:
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    listeners = len(engine.tap._subscriptions)
    return Look(requests, resident, len(models._instances), listeners, Page.frames)


def main(arguments: list[str]) -> int:
    num_requests, first_look = map(int, arguments or ("6000", "1000"))
    start = time.perf_counter()
    first, last = soak(num_requests, first_look)
    for look in (first, last):
        sys.stdout.write(
            f"after {look.requests} requests: {look.resident_bytes / 2**20:.1f} MiB, "
            f"{look.models} models, {look.listeners} listeners, {look.frames} frames\n"
        )
    growth = last.resident_bytes / first.resident_bytes - 1
    has_more = last.models > first.models or last.listeners > first.listeners
    is_good = growth <= MOST_GROWTH and not has_more
    sys.stdout.write(
        f"memory grew by {growth:.1%} in {time.perf_counter() - start:.0f} s; at most "
        f"{MOST_GROWTH:.0%} is allowed: {'good' if is_good else 'FAILED'}\n"
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
