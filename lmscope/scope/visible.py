"""Text that hides nothing: what a model wrote, as a person may safely see it."""

from __future__ import annotations

import html
import json
import unicodedata

__all__ = ["escape", "quoted", "visible"]

# Letters by their class, but nothing is drawn for them.
_FILLERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")


def visible(text: str) -> str:
    """The text with each character that could hide or reorder others written out.

    Line feed and tab stay. Other control characters become `<0x1B>`; what has no width,
    turns the direction of writing or is no character at all becomes `<U+202E>`.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_visible, text))


def quoted(text: str) -> str:
    """Text in double quotes on one line, as a sentence shows it."""
    return json.dumps(visible(text), ensure_ascii=False)


def escape(text: str) -> str:
    """Text as HTML that shows it: markup is not obeyed, hidden characters are visible."""
    return html.escape(visible(text), quote=True)


def _visible(character: str) -> str:
    if character in "\n\t" or (character.isprintable() and character not in _FILLERS):
        return character
    if unicodedata.category(character) == "Zs":  # a kind of space
        return character
    number = ord(character)
    return f"<0x{number:02X}>" if number < 0x100 else f"<U+{number:04X}>"
