"""Text of a model reaches a person's eyes with nothing hidden in it."""

from __future__ import annotations

import pytest

from lmscope.scope.visible import escape, visible


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines\tand a tab", "naïve café", "日本語", "🙂", "x × y – z …", ""]
)
def test_text_that_hides_nothing_is_left_as_it_is(text: str) -> None:
    assert visible(text) == text


def test_escape_covers_quotes_for_attributes() -> None:
    assert escape("\"'<>&") == "&quot;&#x27;&lt;&gt;&amp;"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x00\x1b\x7f\r", "<0x00><0x1B><0x7F><0x0D>"),
        ("\x85\xad", "<0x85><0xAD>"),
        ("\u200b\u200e\u202e\u2066\ufeff", "<U+200B><U+200E><U+202E><U+2066><U+FEFF>"),
        ("\u2028\u061c\u3164\u115f", "<U+2028><U+061C><U+3164><U+115F>"),
        ("\ud800\ue000\U000e0041", "<U+D800><U+E000><U+E0041>"),
    ],
)
def test_what_hides_or_reorders_is_written_out(text: str, shown: str) -> None:
    assert visible(f"a{text}b") == f"a{shown}b"
