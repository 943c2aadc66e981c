"""The parts of a decoding step: what is timed, what is put back, and the table."""

from __future__ import annotations

import pytest
import step
from lmscope_kernels.numba_support import why_not_numba

from lmscope import LLM


@pytest.mark.skipif(why_not_numba() is not None, reason="needs the extra cpu")
def test_parts_of_a_step_are_timed_and_nothing_stays_wrapped(demo_model):
    with LLM(str(demo_model), threads=1, num_kv_blocks=64) as llm:
        body = llm._loop.call(lambda core: core._executor._worker._runner)._body
        work = step._Step(body, 3, 20)
        lean = body._lean
        before = lean._head, lean._compiled._layers

        with step._timed(body, work) as timed:
            first, second = timed(), timed()

        assert set(first) == set(second) == set(step.PARTS)
        assert all(seconds > 0 for seconds in (*first.values(), *second.values()))
        assert (lean._head, lean._compiled._layers) == before


def test_a_line_has_both_ways_and_what_no_part_explains():
    parts = step.parts_ms([dict.fromkeys(step.PARTS, ms / 1e3) for ms in (3, 1, 2)])

    *_, line = step.table({4: ([20.0, 21.0, 22.0], [30.0, 31.0, 32.0], parts)})

    assert parts == dict.fromkeys(step.PARTS, 2)
    assert line == (
        "| 4 | 20.0, 21.0 | 30.0, 31.0 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 9.00 |"
    )


def test_rounds_must_be_at_least_one():
    with pytest.raises(SystemExit):
        step.main(["--rounds", "0"])
