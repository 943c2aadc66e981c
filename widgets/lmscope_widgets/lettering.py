"""Letters for pictures that are drawn without a font: single strokes with round ends.

A still picture is made with numpy alone, so it brings its own alphabet. Each glyph is a
few strokes on a grid (baseline 0, height of small letters 5, of capitals 7, descenders
to -2.2) and is drawn as the distance to its strokes, which gives smooth edges at any
size. What the alphabet does not know is drawn as a hollow box.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Mask", "knows", "text_mask", "text_width"]

Mask = npt.NDArray[np.float32]

_CAP_HEIGHT = 7.0
_DESCENT = 2.6
_ASCENT = 8.2
_GAP = 1.7
# Share of the nominal text size that a capital takes, as in common sans-serif fonts.
_CAP_SHARE = 0.72

# Strokes are separated by ";". A point is "x,y"; "@x,y,rx,ry,from,to" is an arc of an
# ellipse in degrees, counter-clockwise when `to` is larger. A single point is a dot.
_STROKES = {
    "a": "@2,2.5,2,2.5,0,360;4,5 4,0",
    "b": "0,7.3 0,0;@2,2.5,2,2.5,0,360",
    "c": "@2.1,2.5,2.1,2.5,48,312",
    "d": "4,7.3 4,0;@2,2.5,2,2.5,0,360",
    "e": "0.05,2.6 @2,2.5,2,2.5,2,315",
    "f": "1.1,0 @2.5,5.9,1.4,1.4,180,80;0,5 2.5,5",
    "g": "@2,2.5,2,2.5,0,360;4,5 @2.05,-0.3,1.95,1.9,0,-150",
    "h": "0,7.3 0,0;0,3 @1.95,3,1.95,2,180,0 3.9,0",
    "i": "0,5 0,0;0,7",
    "j": "0.9,5 @-0.3,-0.8,1.2,1.4,0,-95;0.9,7",
    "k": "0,7.3 0,0;3.4,5 0,1.9;1.3,3.05 3.6,0",
    "l": "0,7.3 0,0",
    "m": "0,5 0,0;0,3.3 @1.6,3.3,1.6,1.7,180,0 3.2,0;3.2,3.3 @4.8,3.3,1.6,1.7,180,0 6.4,0",
    "n": "0,5 0,0;0,3 @1.95,3,1.95,2,180,0 3.9,0",
    "o": "@2.05,2.5,2.05,2.5,0,360",
    "p": "0,5 0,-2.2;@2,2.5,2,2.5,0,360",
    "q": "4,5 4,-2.2;@2,2.5,2,2.5,0,360",
    "r": "0,5 0,0;0,3 @1.8,3,1.8,2,180,70",
    "s": "@1.65,3.72,1.4,1.28,35,270 @1.65,1.22,1.6,1.22,90,-145",
    "t": "1.1,6.7 @2.4,1.3,1.3,1.3,180,280;0,5 2.5,5",
    "u": "0,5 @1.95,2,1.95,2,180,360;3.9,5 3.9,0",
    "v": "0,5 1.9,0 3.8,5",
    "w": "0,5 1.45,0 2.9,5 4.35,0 5.8,5",
    "x": "0,5 3.6,0;3.6,5 0,0",
    "y": "0,5 2,0.2;3.9,5 1,-2.2",
    "z": "0.1,5 3.5,5 0,0 3.6,0",
    "A": "0,0 2.6,7 5.2,0;0.9,2.4 4.3,2.4",
    "B": "0,3.7 2.3,3.7 @2.3,1.85,2,1.85,90,-90 0,0 0,7 2.1,7 @2.1,5.35,1.7,1.65,90,-90",
    "C": "@2.9,3.5,2.9,3.5,48,312",
    "D": "0,0 0,7 1.6,7 @1.6,3.5,3.3,3.5,90,-90 0,0",
    "E": "3.9,7 0,7 0,0 4,0;0,3.65 3.4,3.65",
    "F": "3.9,7 0,7 0,0;0,3.6 3.3,3.6",
    "G": "@2.9,3.5,2.9,3.5,48,345 5.75,3.3 3.5,3.3",
    "H": "0,7 0,0;4.7,7 4.7,0;0,3.7 4.7,3.7",
    "I": "0,7 0,0",
    "J": "2.9,7 @1.45,1.7,1.45,1.7,0,-170",
    "K": "0,7 0,0;4.4,7 0,2.6;1.5,4.1 4.7,0",
    "L": "0,7 0,0 3.7,0",
    "M": "0,0 0,7 2.9,2 5.8,7 5.8,0",
    "N": "0,0 0,7 4.7,0 4.7,7",
    "O": "@3.1,3.5,3.1,3.5,0,360",
    "P": "0,0 0,7 2.3,7 @2.3,5.2,1.9,1.8,90,-90 0,3.4",
    "Q": "@3.1,3.5,3.1,3.5,0,360;3.9,1.7 6,-0.6",
    "R": "0,0 0,7 2.3,7 @2.3,5.2,1.9,1.8,90,-90 0,3.4;2.2,3.4 4.5,0",
    "S": "@2.1,5.25,1.85,1.75,35,270 @2.1,1.75,2.1,1.75,90,-150",
    "T": "0,7 5,7;2.5,7 2.5,0",
    "U": "0,7 @2.35,2.3,2.35,2.3,180,360 4.7,7",
    "V": "0,7 2.5,0 5,7",
    "W": "0,7 1.8,0 3.6,6.4 5.4,0 7.2,7",
    "X": "0,7 4.7,0;4.7,7 0,0",
    "Y": "0,7 2.4,3.3 4.8,7;2.4,3.3 2.4,0",
    "Z": "0.1,7 4.6,7 0,0 4.7,0",
    "0": "@2.1,3.5,2.1,3.5,0,360",
    "1": "0.7,5.5 2.4,7 2.4,0",
    "2": "@2.1,5,1.95,2,165,-38 0.15,0 4.2,0",
    "3": "@2,5.35,1.75,1.65,155,-90 @2,1.85,2.1,1.85,90,-155",
    "4": "3.2,0 3.2,7 0,2 4.3,2",
    "5": "3.8,7 0.8,7 @2.05,2.25,2.1,2.3,135,-150",
    "6": "@2.1,2.2,2.1,2.2,0,360;0,2.2 @3.5,2.2,3.5,4.8,180,95",
    "7": "0,7 4.2,7 1.4,0",
    "8": "@2.1,5.35,1.7,1.65,0,360;@2.1,1.85,2.1,1.85,0,360",
    "9": "@2.1,4.8,2.1,2.2,0,360;4.2,4.8 @0.7,4.8,3.5,4.8,0,-85",
    ".": "0,0",
    ",": "0.3,0.1 -0.2,-1.4",
    ":": "0,0;0,4.2",
    ";": "0.3,0.1 -0.2,-1.4;0.2,4.2",
    "!": "0,7 0,2.3;0,0",
    "?": "@1.8,5.2,1.8,1.8,170,-40 1.8,3.1 1.8,2.2;1.8,0",
    "-": "0,2.7 2.2,2.7",
    "–": "0,2.7 3.8,2.7",
    "—": "0,2.7 6.4,2.7",
    "_": "0,-1 4,-1",
    "+": "0,2.9 4,2.9;2,4.9 2,0.9",
    "=": "0,3.8 4,3.8;0,1.8 4,1.8",
    "/": "0,-1 2.8,7.4",
    "\\": "0,7.4 2.8,-1",
    "|": "0,7.6 0,-1.8",
    "(": "@2.6,3,2.6,5,120,240",
    ")": "@-1.3,3,2.6,5,60,-60",
    "[": "1.6,7.6 0,7.6 0,-1.4 1.6,-1.4",
    "]": "0,7.6 1.6,7.6 1.6,-1.4 0,-1.4",
    "{": "1.9,7.6 @1.9,6.4,1,1.2,90,180 @0,4.3,0.9,1.2,0,-90 @0,1.9,0.9,1.2,90,0 "
    "@1.9,-0.2,1,1.2,180,270",
    "}": "0,7.6 @0,6.4,1,1.2,90,0 @1.9,4.3,0.9,1.2,180,270 @1.9,1.9,0.9,1.2,90,180 "
    "@0,-0.2,1,1.2,0,-90",
    "<": "3.6,5.2 0,2.8 3.6,0.4",
    ">": "0,5.2 3.6,2.8 0,0.4",
    "%": "@1.3,5.5,1.3,1.5,0,360;@5.5,1.5,1.3,1.5,0,360;5.6,7 1.2,0",
    "#": "1.6,7 0.6,0;4.1,7 3.1,0;0.2,4.7 4.7,4.7;0,2.3 4.5,2.3",
    "&": "5,0 @2.1,5.5,1.4,1.5,215,-45 @2,1.8,2,1.8,135,330 5,3.2",
    "@": "@3.6,3,1.5,1.7,0,360;5.1,4.8 5.1,2 @6,2,0.9,0.9,180,300 @3.5,3,3.5,3.9,0,300",
    "'": "0,7.3 0,5.2",
    '"': "0,7.3 0,5.2;1.7,7.3 1.7,5.2",
    "`": "0,7.3 1.1,5.9",
    "^": "0,4.4 1.7,7 3.4,4.4",
    "~": "@1.05,2.7,1.05,0.8,180,0 @3.15,2.7,1.05,0.8,180,360",
    "*": "1.6,7 1.6,3.8;0.2,6.2 3,4.6;0.2,4.6 3,6.2",
    "$": "@2.1,4.75,1.8,1.25,35,270 @2.1,2.25,2,1.25,90,-150;2.1,7.4 2.1,-0.6",
    "·": "0,2.7",
    "×": "0,4.6 3.4,1.2;0,1.2 3.4,4.6",
    "…": "0,0;2.2,0;4.4,0",
    "•": "0,2.7 0.05,2.7",
}
_TABULAR = frozenset("0123456789")
_TABULAR_WIDTH = 4.2
_SPACE_WIDTH = 1.6
_BOX = "0,0 0,7 4,7 4,0 0,0"


def knows(character: str) -> bool:
    """Whether a character has a glyph or is a space."""
    return character == " " or character in _STROKES


def text_width(text: str, size: float, weight: float = 1.0) -> float:
    """Width of a line of text in pixels, `size` being the nominal text size in pixels."""
    if not text:
        return 0.0
    unit = size * _CAP_SHARE / _CAP_HEIGHT
    return unit * (sum(_advance(character, weight) for character in text) - _gap(weight))


def text_mask(text: str, size: float, weight: float = 1.0) -> tuple[Mask, int]:
    """Coverage of a line of text, and the row of its baseline.

    size     nominal text size in pixels
    weight   1 is regular, about 1.6 is bold
    returns  [height, width] from 0 to 1; half the width of a stroke lies left of the text
    """
    unit = size * _CAP_SHARE / _CAP_HEIGHT
    pad = math.ceil(unit * weight)
    height = math.ceil(unit * (_ASCENT + _DESCENT)) + 2 * pad
    baseline = math.ceil(unit * _ASCENT) + pad
    width = math.ceil(text_width(text, size, weight)) + 2 * pad + 1
    mask = np.zeros((height, width), np.float32)
    x = 0.0
    for character in text:
        if character != " ":
            # Starting each glyph at a whole pixel lets equal letters share one mask.
            left = round(x * unit)
            glyph = _glyph_mask(character, size, weight)
            right = min(width, left + glyph.shape[1])
            np.maximum(mask[:, left:right], glyph[:, : right - left], out=mask[:, left:right])
        x += _advance(character, weight)
    return mask, baseline


@lru_cache(maxsize=1024)
def _glyph_mask(character: str, size: float, weight: float) -> Mask:
    unit = size * _CAP_SHARE / _CAP_HEIGHT
    pad = math.ceil(unit * weight)
    height = math.ceil(unit * (_ASCENT + _DESCENT)) + 2 * pad
    baseline = math.ceil(unit * _ASCENT) + pad
    strokes = _strokes(character)
    shift = _shift(character)
    right = max(float(points[:, 0].max()) for points in strokes) + shift
    width = math.ceil(unit * right) + 2 * pad + 1
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float64)
    distance = np.full((height, width), np.inf)
    for points in strokes:
        x = (points[:, 0] + shift) * unit + pad
        y = baseline - points[:, 1] * unit
        for i in range(max(1, len(points) - 1)):
            j = min(i + 1, len(points) - 1)
            np.minimum(distance, _to_segment(columns, rows, x[i], y[i], x[j], y[j]), out=distance)
    # A dot must be heavier than a stroke to look as heavy.
    half = unit * 0.48 * weight
    mask = np.clip(0.5 + half - distance, 0.0, 1.0)
    for points in strokes:
        if len(points) == 1:
            x, y = (points[0, 0] + shift) * unit + pad, baseline - points[0, 1] * unit
            dot = np.clip(0.5 + half * 1.3 - np.hypot(columns - x, rows - y), 0.0, 1.0)
            mask = np.maximum(mask, dot)
    return mask.astype(np.float32)


def _to_segment(
    columns: npt.NDArray[np.float64],
    rows: npt.NDArray[np.float64],
    x0: float,
    y0: float,
    x1: float,
    y1: float,
) -> npt.NDArray[np.float64]:
    dx, dy = x1 - x0, y1 - y0
    length = dx * dx + dy * dy
    if length == 0.0:
        return np.hypot(columns - x0, rows - y0)
    t = np.clip(((columns - x0) * dx + (rows - y0) * dy) / length, 0.0, 1.0)
    return np.hypot(columns - (x0 + t * dx), rows - (y0 + t * dy))


@lru_cache(maxsize=256)
def _strokes(character: str) -> tuple[npt.NDArray[np.float64], ...]:
    """Each stroke as points [n, 2]."""
    return tuple(_points(stroke) for stroke in _STROKES.get(character, _BOX).split(";"))


def _points(stroke: str) -> npt.NDArray[np.float64]:
    points: list[tuple[float, float]] = []
    for token in stroke.split():
        if not token.startswith("@"):
            x, y = token.split(",")
            points.append((float(x), float(y)))
            continue
        cx, cy, rx, ry, start, end = (float(number) for number in token[1:].split(","))
        count = max(4, round(abs(end - start) / 14))
        for i in range(count + 1):
            angle = math.radians(start + (end - start) * i / count)
            points.append((cx + rx * math.cos(angle), cy + ry * math.sin(angle)))
    return np.array(points)


@lru_cache(maxsize=256)
def _extent(character: str) -> tuple[float, float]:
    strokes = _strokes(character)
    return (
        min(float(points[:, 0].min()) for points in strokes),
        max(float(points[:, 0].max()) for points in strokes),
    )


def _shift(character: str) -> float:
    left, right = _extent(character)
    if character in _TABULAR:
        return (_TABULAR_WIDTH - (right - left)) / 2 - left
    return -left


def _advance(character: str, weight: float) -> float:
    if character == " ":
        return _SPACE_WIDTH + _gap(weight)
    if character in _TABULAR:
        return _TABULAR_WIDTH + _gap(weight)
    left, right = _extent(character)
    return right - left + _gap(weight)


def _gap(weight: float) -> float:
    """Room between letters; heavier strokes grow into it from both sides."""
    return _GAP + 0.96 * (weight - 1.0)
