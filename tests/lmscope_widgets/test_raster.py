"""The canvas draws where it is told, and its PNG files hold what was drawn."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from lmscope_widgets.lettering import knows, text_mask, text_width
from lmscope_widgets.raster import Canvas, blend, png, rgb

WHITE, BLACK, RED = (255, 255, 255), (0, 0, 0), (200, 0, 0)


def read_png(data: bytes) -> np.ndarray:
    """The pixels [height, width, 3] of a file that `png` wrote; checks every checksum."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    position, chunks = 8, {}
    while position < len(data):
        (length,) = struct.unpack(">I", data[position : position + 4])
        body = data[position + 4 : position + 8 + length]
        (checksum,) = struct.unpack(">I", data[position + 8 + length : position + 12 + length])
        assert zlib.crc32(body) == checksum
        chunks[body[:4]] = body[4:]
        position += 12 + length
    width, height, depth, kind = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert depth == 8
    channels = 1 if kind == 3 else 3
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8)
    lines = lines.reshape(height, 1 + width * channels)
    assert not lines[:, 0].any()
    if kind == 3:
        return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)[lines[:, 1:]]
    return lines[:, 1:].reshape(height, width, 3)


def test_a_png_of_few_colours_is_indexed_and_reads_back_the_same() -> None:
    canvas = Canvas(20, 10, WHITE)
    canvas.rect(2, 3, 5, 4, RED)
    data = canvas.png()

    assert b"PLTE" in data
    assert np.array_equal(read_png(data), canvas.pixels)


def test_a_png_of_many_colours_reads_back_the_same() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    data = png(pixels)

    assert b"PLTE" not in data
    assert np.array_equal(read_png(data), pixels)


def test_a_rectangle_covers_its_pixels_and_no_others() -> None:
    canvas = Canvas(10, 10, WHITE)
    canvas.rect(2, 3, 4, 5, RED)

    is_red = (canvas.pixels == RED).all(axis=2)
    assert is_red[6:16, 4:12].all()
    assert is_red.sum() == 10 * 8


def test_a_thin_mark_is_never_lost_to_rounding() -> None:
    canvas = Canvas(10, 10, WHITE)
    canvas.rect(2.1, 3.1, 0.1, 0.1, RED)

    assert (canvas.pixels == RED).all(axis=2).sum() == 1


def test_what_lies_outside_is_cut_and_not_wrapped_around() -> None:
    canvas = Canvas(10, 10, WHITE)
    canvas.rect(8, -3, 5, 5, RED)
    canvas.text(8, 5, "wide", 12, BLACK)
    canvas.text(-20, -20, "gone", 12, BLACK)

    is_red = (canvas.pixels == RED).all(axis=2)
    assert is_red.any()
    assert (canvas.pixels[:, :14] == WHITE).all()


@pytest.mark.parametrize("draw", ["frame", "dashes", "hatch", "dots", "cross"])
def test_outlines_and_patterns_stay_inside_their_rectangle(draw: str) -> None:
    canvas = Canvas(20, 20, WHITE)
    getattr(canvas, draw)(5, 5, 10, 8, RED)

    is_drawn = (canvas.pixels != WHITE).any(axis=2)
    assert 0 < is_drawn.sum() < 20 * 16
    is_drawn[10:26, 10:30] = False
    assert not is_drawn.any()


def test_every_printable_ascii_character_has_a_glyph_of_its_own() -> None:
    shapes = {}
    for code in range(0x21, 0x7F):
        assert knows(chr(code)), chr(code)
        mask, _ = text_mask(chr(code), 24)
        assert mask.max() == 1.0
        shapes[chr(code)] = mask.tobytes()
    # l, I and | differ in height only, so nothing may be equal.
    assert len(set(shapes.values())) == len(shapes)


def test_text_is_as_wide_as_it_says_and_digits_are_all_alike() -> None:
    mask, _ = text_mask("Blocks 42", 24)
    columns = np.flatnonzero(mask.max(axis=0) > 0.5)

    assert abs((columns[-1] - columns[0]) - text_width("Blocks 42", 24)) <= 4
    assert len({text_width(digit, 24) for digit in "0123456789"}) == 1
    assert text_width("", 24) == 0.0


def test_an_unknown_character_is_a_hollow_box() -> None:
    first, _ = text_mask("漢", 24)
    second, _ = text_mask("字", 24)

    assert np.array_equal(first, second)
    assert first.max() == 1.0


def test_colours() -> None:
    assert rgb("#3A8DDB") == (0x3A, 0x8D, 0xDB)
    assert blend(WHITE, BLACK, 0.5) == (128, 128, 128)
