"""The still picture reads without style, hides nothing and stays small whatever is in it."""

from __future__ import annotations

import base64
import html.parser
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lmscope_widgets.palette import light
from lmscope_widgets.step_log import StepBar
from lmscope_widgets.still import MOST_BYTES, alt_text, still
from lmscope_widgets.still_map import BlockMap

STEPS = [
    StepBar(step=i, decode=3, prefill=20 * (i % 5 == 0), used=i, kept=2, waiting=i % 2)
    for i in range(1, 41)
]


class Reader(html.parser.HTMLParser):
    """Collects tags, attributes and text of a piece of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: dict[str, dict[str, str]] = {}
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes[tag] = {name: value or "" for name, value in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def size(bundle: dict[str, str]) -> int:
    return sum(len(text.encode()) for text in bundle.values())


def test_has_one_image_with_alt_text_a_plain_table_and_the_texts(make_frame: Any) -> None:
    bundle = still(*make_frame(), STEPS, "blocks #AAAa")
    reader = Reader(bundle["text/html"])

    assert reader.tags.count("img") == 1
    assert reader.attributes["img"]["src"].startswith("data:image/png;base64,")
    data = base64.b64decode(reader.attributes["img"]["src"].split(",", 1)[1], validate=True)
    assert data.startswith(b"\x89PNG")
    assert "step 40, finished" in reader.attributes["img"]["alt"]
    assert "12/49 blocks used" in reader.attributes["img"]["alt"]
    assert set(reader.tags) == {"div", "img", "table", "tr", "th", "td", "pre"}
    assert "decode: 1 token" in reader.text
    assert "Glass is a solid." in reader.text
    assert bundle["text/plain"] == "blocks #AAAa"


def test_needs_no_style_and_asks_for_nothing_outside(make_frame: Any) -> None:
    text = still(*make_frame(), STEPS, "")["text/html"]

    assert "<style" not in text
    assert "<script" not in text
    assert "class=" not in text
    assert not re.search(r"(src|href)=\"(?!data:image/png;base64,)", text)


def test_markup_in_texts_is_shown_and_not_obeyed(make_frame: Any, make_row: Any) -> None:
    hostile = '<script>alert(1)</script><img src=x onerror="a"> &amp; </pre></table> \'"'
    row = make_row(0, id=hostile, why=hostile, prompt_text=hostile, text=hostile)
    frame, columns = make_frame(rows=[row], note=hostile)
    frame["info"]["model"] = hostile

    text = still(frame, columns, STEPS, hostile)["text/html"]
    reader = Reader(text)

    assert set(reader.tags) == {"div", "img", "table", "tr", "th", "td", "pre"}
    assert reader.tags.count("img") == 1
    assert set(reader.attributes["img"]) == {"alt", "width", "style", "src"}
    assert hostile in reader.attributes["img"]["alt"]
    assert "<script>alert(1)</script>" in reader.text


def test_hidden_and_reordering_characters_become_visible(make_frame: Any, make_row: Any) -> None:
    hostile = "a\x1b[31mb\u202ec\u2066d\u200be\x85f\ufefftag\U000e0041 lone\ud800"
    frame, columns = make_frame(rows=[make_row(0, text=hostile, prompt_text=hostile, id=hostile)])

    bundle = still(frame, columns, STEPS, hostile)

    for text in bundle.values():
        for character in "\x1b\u202e\u2066\u200b\x85\ufeff\U000e0041\ud800":
            assert character not in text
    assert "a<0x1B>[31mb<U+202E>c<U+2066>d<U+200B>e<0x85>f" in bundle["text/plain"]
    assert "&lt;U+202E&gt;" in bundle["text/html"]


@pytest.mark.parametrize("num_blocks", [2, 50, 128, 512, 2048, 30_000, 1_000_000])
@pytest.mark.parametrize("num_requests", [0, 1, 16, 64])
def test_stays_small_for_any_pool_and_any_number_of_requests(
    make_frame: Any, num_blocks: int, num_requests: int
) -> None:
    held = max(1, num_blocks // (num_requests + 1) - 2)
    frame, columns = make_frame(
        num_blocks=num_blocks,
        num_requests=num_requests,
        held=min(held, 4000),
        has_cells=num_blocks <= 2048,
    )

    bundle = still(frame, columns, STEPS, "x" * 10_000)

    assert size(bundle) <= MOST_BYTES
    assert "<img " in bundle["text/html"]


@pytest.mark.parametrize(
    "text", ["x" * 1_000_000, "&" * 1_000_000, "漢" * 1_000_000, "\x00" * 10**6]
)
def test_megabyte_texts_do_not_make_it_larger(make_frame: Any, make_row: Any, text: str) -> None:
    rows = [
        make_row(i, id=f"r{i}" + text, why=text, prompt_text=text, text=text) for i in range(40)
    ]
    frame, columns = make_frame(rows=rows, note=text)
    frame["info"]["model"] = text

    bundle = still(frame, columns, STEPS, text)

    assert size(bundle) <= MOST_BYTES
    assert "<img " in bundle["text/html"]
    assert "16 earlier requests" in bundle["text/html"]
    Reader(bundle["text/html"])
    assert not re.search(r"&[a-z]*…", bundle["text/html"])


def test_the_noisiest_pool_is_still_small(make_frame: Any) -> None:
    random = np.random.default_rng(0)
    for num_blocks in (600, 5_000, 30_000, 200_000):
        frame, columns = make_frame(num_blocks=num_blocks, has_cells=False)
        columns["slot"] = random.integers(0, 24, num_blocks, dtype=np.uint8)
        columns["state"] = random.choice(
            np.array([0, 1, 2, 0x11, 0x21, 0x41], np.uint8), num_blocks
        )
        columns["ref"] = random.integers(0, 3, num_blocks, dtype=np.uint8)

        assert size(still(frame, columns, STEPS, "")) <= MOST_BYTES, num_blocks


def test_without_steps_and_requests_it_is_an_empty_pool(make_frame: Any) -> None:
    frame, columns = make_frame(num_requests=0, phase="ready", step=0)

    bundle = still(frame, columns, [], "")

    assert set(Reader(bundle["text/html"]).tags) == {"div", "img"}
    assert "0/49 blocks used" in alt_text(frame)


def test_the_share_from_cache_is_a_dash_while_there_is_none(make_frame: Any) -> None:
    frame, _ = make_frame()
    frame["stat"]["prompt_tokens"] = 0

    assert "– from cache" in alt_text(frame)


def draw_map(make_frame: Callable[..., Any], **options: Any) -> np.ndarray:
    from lmscope_widgets.raster import Canvas

    frame, columns = make_frame(**options)
    slots = {row["id"]: row["slot"] for row in frame["rows"]}
    blocks = BlockMap(columns, frame["cells"], 4, frame["next"], slots, labels=0)
    canvas = Canvas(776, 400, light().background)
    blocks.draw(canvas, 0, 0, 776, 400)
    return canvas.pixels


@pytest.mark.parametrize("num_blocks", [50, 500, 5_000, 30_000])
def test_each_request_shows_its_hue_and_no_request_shows_another(
    make_frame: Any, num_blocks: int
) -> None:
    pixels = draw_map(
        make_frame, num_blocks=num_blocks, num_requests=3, held=num_blocks // 5, has_cells=False
    )
    shown = {tuple(colour) for colour in np.unique(pixels.reshape(-1, 3), axis=0).tolist()}

    for slot in range(3):
        assert light().owner(slot).edge in shown
    for slot in range(3, 8):
        assert light().owner(slot).edge not in shown


@pytest.mark.parametrize("fill", range(5))
def test_a_foot_is_as_long_as_the_tokens_in_its_block(make_frame: Any, fill: int) -> None:
    from lmscope_widgets.raster import Canvas

    _, columns = make_frame(num_blocks=12, num_requests=1, held=1, has_cells=False)
    columns["fill"][:] = fill
    canvas = Canvas(776, 400, light().background, scale=1)
    BlockMap(columns, [], 4, [], {"r0": 0}, labels=0).draw(canvas, 0, 0, 776, 400)
    # The lowest line of block 1: cells are 86 by 46 pixels, gap of 2 included.
    foot = canvas.pixels[43, 86 : 86 + 84]

    assert (foot == light().owner(0).edge).all(axis=1).sum() == 21 * fill


def test_a_million_blocks_are_drawn_as_shares_of_bins(make_frame: Any) -> None:
    pixels = draw_map(
        make_frame, num_blocks=1_000_000, num_requests=2, held=250_000, has_cells=False
    )
    first, second = light().owner(0).edge, light().owner(1).edge
    area_of_first = (pixels == first).all(axis=2).sum()
    area_of_second = (pixels == second).all(axis=2).sum()
    area_of_empty = (pixels == light().line_soft).all(axis=2).sum()

    # A quarter of the pool each, and half of it empty.
    assert area_of_first == pytest.approx(area_of_second, rel=0.02)
    assert area_of_empty == pytest.approx(2 * area_of_first, rel=0.02)
