"""Large frames are deflated on their way; everything else goes as it is."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from lmscope_widgets.packing import pack

from lmscope import LLM, SamplingParams
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.view import EngineView

WORDS = "Because air scatters light of short waves more than light of long ones, skies are blue. "


def test_a_small_frame_and_a_reply_go_as_they_are() -> None:
    for message in ({"k": "delta", "rows": []}, {"k": "reply", "error": "x" * 20_000}):
        buffer = np.zeros(3, np.uint8).data
        assert pack(message, [buffer]) == (message, [buffer])


def test_the_header_of_a_large_frame_comes_deflated_before_its_buffers() -> None:
    message = {
        "k": "full",
        "seq": 3,
        "rows": [{"id": f"r{i}", "text": "é" * 99} for i in range(99)],
    }
    buffer = np.arange(3, dtype=np.uint8).data

    content, (header, rest) = pack(message, [buffer])

    assert content == {"k": "packed"}
    assert json.loads(zlib.decompress(header)) == message
    assert rest is buffer
    assert len(header) < 16_384


def test_every_frame_of_a_million_blocks_with_sixty_requests_is_below_64_kb() -> None:
    options: dict[str, Any] = {"num_kv_blocks": 1_000_000, "max_num_seqs": 64, "block_size": 16}
    told: list[Any] = []
    say: Callable[[str, int], int] = lambda _, position: ord(WORDS[position % len(WORDS)])  # noqa: E731
    with LLM("scripted", execute="scripted", script=say, **options) as engine:
        snapshot, following = engine.tap.follow(told.append)
        params = SamplingParams(max_tokens=120)
        prompts = [f"You are a patient tutor. Question {number}: why?" for number in range(60)]
        engine.generate(prompts, params, use_tqdm=False)
        following.close()
    view = EngineView(snapshot, keep_finished=64)
    deltas = PictureEncoder(view, in_bins=True)
    sizes: dict[str, list[int]] = {"full": [], "delta": []}
    for place, boundary in enumerate(told):
        view.apply(boundary)
        if place % 20 == 0:
            sizes["delta"].append(_bytes_sent(deltas.delta("live")))
        if place % 200 == 0 or boundary is told[-1]:
            sizes["full"].append(_bytes_sent(PictureEncoder(view, in_bins=True).full("live")))

    assert view.totals.finished == 60
    assert len(sizes["full"]) > 3
    assert max(sizes["full"]) < 2**16
    assert max(sizes["delta"]) < 2**16


def _bytes_sent(frame: Any) -> int:
    content, buffers = pack(*frame.to_message())
    return len(json.dumps(content)) + sum(len(buffer) for buffer in buffers)
