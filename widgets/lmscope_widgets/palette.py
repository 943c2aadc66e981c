"""The colours of a still picture: the light half of palette.json, which JavaScript reads too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lmscope_widgets.raster import RGB, blend, rgb

__all__ = ["NEUTRAL_SLOT", "NO_SLOT", "READABLE", "Ground", "Owner", "Palette", "light"]

NEUTRAL_SLOT = 254
NO_SLOT = 255
READABLE = 4.5
"""Least contrast of text, as WCAG asks for."""


@dataclass(frozen=True)
class Owner:
    """How the blocks of one owner slot look.

    ring   0 plain, 1 diagonal stripes, 2 dots: requests 1 to 8, 9 to 16, 17 to 24
    """

    hue: RGB
    tint: RGB
    edge: RGB
    ring: int


@dataclass(frozen=True)
class Ground:
    """A colour under text, and the text's, which reads on it."""

    ground: RGB
    text: RGB


@dataclass(frozen=True)
class Palette:
    """attention   from little to most, in even steps of lightness"""

    background: RGB
    raised: RGB
    ink: RGB
    ink_soft: RGB
    line: RGB
    line_soft: RGB
    trouble: RGB
    trouble_text: RGB
    trouble_tint: RGB
    decode: RGB
    prefill: RGB
    recompute: RGB
    cached: RGB
    owners: tuple[Owner, ...]
    neutral: Owner
    attention: tuple[Ground, ...]

    def owner(self, slot: int) -> Owner:
        return self.owners[slot] if slot < len(self.owners) else self.neutral


@lru_cache(maxsize=1)
def light() -> Palette:
    """The light palette, read once."""
    data = json.loads(Path(__file__).with_name("palette.json").read_text(encoding="utf-8"))
    colours = {name: rgb(value) for name, value in data["light"].items()}
    work = {name: rgb(value) for name, value in data["work"]["light"].items()}
    owners = data["owners"]
    ground, ink = colours["background"], colours["ink"]

    def look(hue: RGB, ring: int) -> Owner:
        is_pale = _contrast(hue, ground) < owners["edge_below"]
        edge = blend(hue, ink, owners["edge_mix"]) if is_pale else hue
        return Owner(hue, blend(ground, hue, owners["tint"]["light"]), edge, ring)

    hues = [rgb(owners["light"][name]) for name in owners["order"]]
    return Palette(
        **{name: colours[name] for name in _NAMES},
        **{name: work[name] for name in ("decode", "prefill", "recompute", "cached")},
        owners=tuple(look(hue, ring) for ring in range(len(owners["rings"])) for hue in hues),
        neutral=look(rgb(owners["neutral"]["light"]), 0),
        attention=tuple(
            Ground(shade, _text_on(shade, (ink, ground)))
            for shade in map(rgb, data["attention"]["light"])
        ),
    )


_NAMES = (
    "background",
    "raised",
    "ink",
    "ink_soft",
    "line",
    "line_soft",
    "trouble",
    "trouble_text",
    "trouble_tint",
)


def _text_on(ground: RGB, wanted: tuple[RGB, ...]) -> RGB:
    """The first of the wanted colours that reads on a ground, else black or white: one does."""
    for text in wanted:
        if _contrast(ground, text) >= READABLE:
            return text
    return max(((0, 0, 0), (255, 255, 255)), key=lambda text: _contrast(ground, text))


def _contrast(colour: RGB, ground: RGB) -> float:
    """Contrast ratio of WCAG, from 1 to 21."""
    bright, dark = sorted((_luminance(colour), _luminance(ground)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: RGB) -> float:
    channels = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (part / 255 for part in colour)
    ]
    return 0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2]
