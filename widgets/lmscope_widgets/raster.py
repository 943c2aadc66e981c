"""A canvas on a numpy array, and PNG on zlib: enough to draw a still picture.

Coordinates are in picture pixels; the canvas keeps `scale` device pixels for each, and
every edge is snapped to whole device pixels, so bars and cells stay sharp.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from lmscope_widgets.lettering import text_mask, text_width

__all__ = ["RGB", "Canvas", "blend", "png", "rgb"]

RGB = tuple[int, int, int]


def rgb(colour: str) -> RGB:
    """(red, green, blue) of "#RRGGBB"."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def blend(ground: RGB, colour: RGB, share: float) -> RGB:
    """`share` of `colour` over `ground`."""
    red, green, blue = (round(g + (c - g) * share) for g, c in zip(ground, colour, strict=True))
    return red, green, blue


class Canvas:
    """`pixels` is [height * scale, width * scale, 3], uint8.

    shades   steps between ground and ink at the edge of a letter. Two look smooth at two
             device pixels per pixel; each further one makes the file larger by a tenth.
    """

    def __init__(
        self, width: int, height: int, ground: RGB, scale: int = 2, shades: int = 2
    ) -> None:
        self.width = width
        self.height = height
        self.scale = scale
        self.shades = shades
        self.pixels: npt.NDArray[np.uint8] = np.empty((height * scale, width * scale, 3), np.uint8)
        self.pixels[:] = ground

    def rect(self, x: float, y: float, width: float, height: float, colour: RGB) -> None:
        """Fill a rectangle; one that is not empty is at least one device pixel wide and high."""
        self._area(x, y, width, height)[:] = colour

    def frame(
        self, x: float, y: float, width: float, height: float, colour: RGB, line: float = 1.0
    ) -> None:
        """A rectangle's outline, drawn inside it."""
        self.rect(x, y, width, line, colour)
        self.rect(x, y + height - line, width, line, colour)
        self.rect(x, y, line, height, colour)
        self.rect(x + width - line, y, line, height, colour)

    def dashes(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: RGB,
        line: float = 1.0,
        dash: float = 3.0,
    ) -> None:
        """A rectangle's outline in dashes, drawn inside it."""
        self.dashed_row(x, y, width, colour, line, dash)
        self.dashed_row(x, y + height - line, width, colour, line, dash)
        period = self._device(2 * dash)
        for left in (x, x + width - line):
            area = self._area(left, y, line, height)
            area[np.arange(area.shape[0]) % period < period // 2] = colour

    def dashed_row(
        self, x: float, y: float, width: float, colour: RGB, line: float = 1.0, dash: float = 3.0
    ) -> None:
        """A horizontal dashed line."""
        period = self._device(2 * dash)
        area = self._area(x, y, width, line)
        area[:, np.arange(area.shape[1]) % period < period // 2] = colour

    def hatch(self, x: float, y: float, width: float, height: float, colour: RGB) -> None:
        """Diagonal stripes over what is there."""
        area = self._area(x, y, width, height)
        rows, columns = np.indices(area.shape[:2])
        area[(rows + columns) % (3 * self.scale) < 1.5 * self.scale] = colour

    def dots(self, x: float, y: float, width: float, height: float, colour: RGB) -> None:
        """A grid of dots over what is there."""
        area = self._area(x, y, width, height)
        rows, columns = np.indices(area.shape[:2])
        period, size = 4 * self.scale, 1.5 * self.scale
        area[(rows % period < size) & (columns % period < size)] = colour

    def cross(self, x: float, y: float, width: float, height: float, colour: RGB) -> None:
        """Both diagonals of a rectangle."""
        area = self._area(x, y, width, height)
        rows, columns = np.indices(area.shape[:2])
        tall, wide = area.shape[:2]
        along = columns * tall
        for across in (rows * wide, (tall - 1 - rows) * wide):
            area[np.abs(across - along) < 0.5 * self.scale * max(tall, wide)] = colour

    def corner(self, x: float, y: float, size: float, colour: RGB) -> None:
        """A triangle in the top left corner of a cell."""
        area = self._area(x, y, size, size)
        rows, columns = np.indices(area.shape[:2])
        area[rows + columns < area.shape[0]] = colour

    def marker(self, x: float, y: float, size: float, colour: RGB) -> None:
        """A triangle that points down at (x, y + size)."""
        area = self._area(x - size / 2, y, size, size)
        rows, columns = np.indices(area.shape[:2])
        middle = (area.shape[1] - 1) / 2
        inside = np.abs(columns - middle) <= (area.shape[0] - rows) * middle / area.shape[0]
        area[inside] = colour

    def text(
        self, x: float, y: float, text: str, size: float, colour: RGB, weight: float = 1.0
    ) -> float:
        """Write a line with its baseline at `y`; returns where it ends."""
        mask, baseline = text_mask(text, size * self.scale, weight)
        pad = baseline - round(y * self.scale)
        left = round(x * self.scale) - self._pad(size, weight)
        top = -pad
        rows = slice(max(0, top), min(self.pixels.shape[0], top + mask.shape[0]))
        columns = slice(max(0, left), min(self.pixels.shape[1], left + mask.shape[1]))
        area = self.pixels[rows, columns]
        inside = mask[
            rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
        ]
        cover = (np.round(inside * self.shades) / self.shades)[:, :, None]
        area[:] = np.round(area + (np.array(colour, np.float32) - area) * cover)
        return x + text_width(text, size, weight)

    def png(self) -> bytes:
        return png(self.pixels)

    def _pad(self, size: float, weight: float) -> int:
        mask, _ = text_mask("", size * self.scale, weight)
        return int(mask.shape[1]) // 2

    def _device(self, length: float) -> int:
        return max(2, round(length * self.scale))

    def _area(self, x: float, y: float, width: float, height: float) -> npt.NDArray[np.uint8]:
        left, top = round(x * self.scale), round(y * self.scale)
        right, bottom = round((x + width) * self.scale), round((y + height) * self.scale)
        if width > 0:
            right = max(right, left + 1)
        if height > 0:
            bottom = max(bottom, top + 1)
        return self.pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)]


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A PNG file of [height, width, 3] uint8; with at most 256 colours it is indexed."""
    height, width, _ = pixels.shape
    wide = pixels.astype(np.uint32)
    packed = (wide[:, :, 0] << 16) | (wide[:, :, 1] << 8) | wide[:, :, 2]
    # A table of all colours is faster than sorting all pixels.
    table = np.zeros(1 << 24, np.uint8)
    table[packed] = 1
    colours = np.flatnonzero(table)
    if len(colours) <= 256:
        table[colours] = np.arange(len(colours))
        rows = table[packed]
        entries = b"".join(struct.pack(">I", colour)[1:] for colour in colours.tolist())
        kind, palette = 3, _chunk(b"PLTE", entries)
    else:
        rows = np.ascontiguousarray(pixels).reshape(height, width * 3)
        kind, palette = 2, b""
    # Filter 0 on every row: flat areas repeat, and deflate finds repeats by itself.
    lines = np.zeros((height, rows.shape[1] + 1), np.uint8)
    lines[:, 1:] = rows
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0))
        + palette
        + _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
