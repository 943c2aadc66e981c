"""How much memory is free, as the system says it or as it is guessed."""

from __future__ import annotations

import pytest

from lmscope.models import free_memory
from lmscope.models.free_memory import available_memory_bytes, free_memory_bytes


@pytest.fixture
def meminfo(tmp_path, monkeypatch):
    """`meminfo(text)` is what the system says; None: it says nothing."""

    def say(text):
        file = tmp_path / "meminfo"
        if text is not None:
            file.write_text(text)
        monkeypatch.setattr(free_memory, "open", lambda _: file.open(), raising=False)

    return say


def test_the_system_says_what_is_available(meminfo):
    meminfo("MemTotal:       2000 kB\nMemFree:         10 kB\nMemAvailable:  1000 kB\n")

    assert available_memory_bytes() == free_memory_bytes() == 1_024_000


@pytest.mark.parametrize("text", [None, "MemTotal:       2000 kB\n"])
def test_where_it_does_not_half_of_what_there_is_is_a_guess(meminfo, monkeypatch, text):
    meminfo(text)
    monkeypatch.setattr(free_memory.os, "sysconf", {"SC_PHYS_PAGES": 600, "SC_PAGE_SIZE": 4096}.get)

    assert available_memory_bytes() is None
    assert free_memory_bytes() == 300 * 4096
