"""Pausing the search for garbage: what stays as it was, and what is old afterwards."""

from __future__ import annotations

import gc
import threading

import pytest

from lmscope import LLM
from lmscope.collection import paused_collection


@pytest.fixture(autouse=True)
def _as_it_was():
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_nothing_is_collected_inside_and_what_was_made_is_old_afterwards():
    gc.collect()
    with paused_collection:
        assert not gc.isenabled()
        made = [[number] for number in range(20_000)]
        assert gc.get_count()[0] > 20_000
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
    assert not young.intersection(map(id, made))


def test_it_ends_with_the_last_one_out_and_after_an_error():
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with paused_collection:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=stay)
    with paused_collection:
        thread.start()
        inside.wait()
    with pytest.raises(KeyError), paused_collection:
        raise KeyError
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_who_has_no_collection_or_has_frozen_objects_keeps_that():
    gc.disable()
    with paused_collection:
        pass
    assert not gc.isenabled()

    gc.enable()
    frozen = [[]]
    gc.freeze()
    try:
        with paused_collection:
            made = [[]]
        # How many are frozen is no measure: they go when nobody has them any more.
        not_frozen = set(map(id, gc.get_objects()))
        assert id(frozen) not in not_frozen
        assert id(made) in not_frozen
    finally:
        gc.unfreeze()


def test_an_engine_that_cannot_be_made_ends_the_pause(tmp_path):
    with pytest.raises(ValueError, match="no config"):
        LLM(tmp_path)
    assert gc.isenabled()
    LLM("scripted", execute="scripted", script=lambda *_: 1).close()
    assert gc.isenabled()
