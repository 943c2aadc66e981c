"""Outputs that are still on their way from a device: who waits for them, and when."""

from __future__ import annotations

import pytest

from lmscope import LLM, SamplingParams
from lmscope.boundary import ModelRunnerOutput, SchedulerOutput
from lmscope.execute.scripted import ScriptedExecutor

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class OnItsWay:
    """Comes when somebody waits for it; notes who did."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output
        self.has_landed = False
        self.num_taken = 0

    def wait(self) -> None:
        self.has_landed = True

    def get_output(self) -> ModelRunnerOutput:
        self.has_landed = True
        self.num_taken += 1
        return self.output


@pytest.fixture
def on_their_way(monkeypatch: pytest.MonkeyPatch) -> list[OnItsWay]:
    """All outputs of scripted engines, each of them on its way when its step is over."""
    made = []
    sample_tokens = ScriptedExecutor.sample_tokens

    def sample(self: ScriptedExecutor) -> OnItsWay:
        made.append(OnItsWay(sample_tokens(self)))
        return made[-1]

    monkeypatch.setattr(ScriptedExecutor, "sample_tokens", sample)
    return made


def make(**options) -> LLM:
    return LLM("s", execute="scripted", script=lambda request, position: 97 + position, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_output_is_taken_once_and_gives_the_same_tokens(on_their_way, asynchronous):
    with make(async_scheduling=asynchronous) as llm:
        (output,) = llm.generate("abc", PARAMS, use_tqdm=False)

    assert output.outputs[0].token_ids == tuple(range(97, 109))
    assert len(on_their_way) >= 12
    # The last step in flight at the end may be dropped with the engine.
    assert [each.num_taken for each in on_their_way][:12] == [1] * 12


def test_an_engine_that_stands_at_a_gate_has_nothing_on_its_way(on_their_way):
    with make(async_scheduling=True) as llm:
        llm.gate.pause()
        stream = llm.submit("abc", PARAMS)
        while llm.gate.step(SchedulerOutput).step < 5:
            pass
        in_flight = llm.gate.in_flight
        seen = [(each.has_landed, each.num_taken) for each in on_their_way]
        llm.gate.resume()
        stream.wait()

    # Step 5 was not handed over yet; step 4 has run, and is taken in when the gate opens.
    assert in_flight == (4,)
    assert seen == [(True, 1), (True, 1), (True, 1), (True, 0)]
