"""The debugger as code uses it, without a notebook; scripted model, no torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lmscope
from lmscope import LLM, ModelRunnerOutput, SamplingParams, SchedulerOutput, notebook
from lmscope.boundary import EngineCoreRequest, RequestOutput
from lmscope.debugger import Debugger
from lmscope.errors import GateClosedError
from lmscope.scope.recording import record
from lmscope.scope.replay import replay

DEADLINE_S = 200


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setattr(notebook, "get_ipython", lambda: None)
    with LLM(
        "s",
        execute="scripted",
        script=lambda request_id, position: 97 + position % 26,
        block_size=4,
        num_kv_blocks=9,
    ) as engine:
        yield engine


def test_steps_through_a_request_and_lets_it_run(llm: LLM) -> None:
    dbg = lmscope.debug(llm)
    assert isinstance(dbg, lmscope.Debugger)
    assert dbg.view is None
    assert dbg.is_closed
    assert dbg.at is None
    assert repr(dbg) == "<Debugger of s: paused before the next struct, 0 breakpoints>"

    stream = llm.submit("abcde", SamplingParams(max_tokens=3))
    assert isinstance(dbg.step(), EngineCoreRequest)
    assert dbg.step(ModelRunnerOutput).step == 1
    assert dbg.at is dbg.pause()
    assert repr(dbg) == "<Debugger of s: stands at ModelRunnerOutput of step 1, 0 breakpoints>"
    with pytest.raises(GateClosedError):
        stream.wait(DEADLINE_S)

    dbg.resume()
    assert stream.wait(DEADLINE_S).text == "abc"
    assert repr(dbg) == "<Debugger of s: running, 0 breakpoints>"


def test_breaks_where_something_happens_and_where_a_function_says(llm: LLM) -> None:
    dbg = lmscope.debug(llm)
    made = dbg.break_on("first_token", once=True)

    @dbg.break_when(SchedulerOutput, name="the third step")
    def third(output: SchedulerOutput) -> bool:
        return output.step == 3

    assert dbg.breakpoints == (made, third)
    assert third.name == "the third step"
    stream = llm.submit("abcde", SamplingParams(max_tokens=3))
    assert isinstance(dbg.step(RequestOutput), lmscope.EngineCoreOutputs)
    assert made.hits == 1
    at = dbg.step(RequestOutput)
    while at.step < 3:
        at = dbg.step(RequestOutput)
    assert isinstance(at, SchedulerOutput)

    dbg.close()
    dbg.close()
    assert llm.gate.breakpoints == ()
    assert not llm.gate.is_closed
    assert stream.wait(DEADLINE_S).finished


def test_leaves_the_breakpoints_of_others(llm: LLM) -> None:
    other = llm.gate.break_when(SchedulerOutput, lambda output: False)
    with lmscope.debug(llm) as dbg:
        dbg.break_on("finish")
        assert len(dbg.breakpoints) == 2
    assert llm.gate.breakpoints == (other,)


def test_a_replay_is_debugged_the_same_way_and_stays_where_it_stands(llm: LLM) -> None:
    with record(llm) as recording:
        llm.generate("abcde", SamplingParams(max_tokens=3), use_tqdm=False)
    with replay(recording) as player:
        dbg = lmscope.debug(player)
        assert dbg.step(SchedulerOutput).step == 1
        dbg.close()
        assert player.step == 1
        assert not player.is_playing


def test_what_cannot_be_stopped_is_named() -> None:
    with pytest.raises(TypeError, match="a str has no gate"):
        lmscope.debug("llm")  # type: ignore[arg-type]  # what a user may try


def test_an_engine_that_has_ended_is_said_to_have(llm: LLM) -> None:
    dbg = Debugger(llm)
    llm.close()
    assert "ended" in repr(dbg)
    assert dbg.pause() is None
