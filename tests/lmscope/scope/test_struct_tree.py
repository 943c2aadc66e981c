"""The struct under the cursor: all of it that matters, bounded, and where the engine stands."""

from __future__ import annotations

import json

import pytest

from lmscope.boundary import (
    EngineCoreRequest,
    EngineInfo,
    EngineSnapshot,
    ModelRunnerOutput,
    SchedulerOutput,
)
from lmscope.decisions import Code, Decision, Outcome
from lmscope.sampling_params import SamplingParams
from lmscope.scope.struct_tree import CUT, boundary_index, standing, struct_tree
from lmscope.scope.view import EngineView


@pytest.fixture
def view():
    info = EngineInfo(
        model="m",
        block_size=4,
        num_blocks=8,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=1024,
    )
    return EngineView(EngineSnapshot(info=info, free_queue=range(1, 8)))


def arrive(view, number=0, **more):
    view.apply(
        EngineCoreRequest(
            request_id=f"r{number}",
            prompt_token_ids=(1, 2),
            sampling_params=SamplingParams(max_tokens=3),
            time=number / 3,
            **more,
        )
    )


def fields(view):
    tree = struct_tree(view)
    assert len(json.dumps(tree)) < 40_000
    return dict(tree["fields"])


def test_before_the_first_struct_there_is_none(view):
    assert struct_tree(view) is None
    assert boundary_index(view) == -1
    assert standing(view) == "Nothing has crossed a boundary yet."


def test_fields_keep_their_order_and_defaults_of_inner_structs_are_left_out(view):
    arrive(view)
    tree = struct_tree(view)

    assert tree["kind"] == "EngineCoreRequest"
    assert [name for name, _ in tree["fields"]][:4] == [
        "step", "time", "request_id", "prompt_token_ids",
    ]  # fmt: skip
    assert dict(tree["fields"])["sampling_params"] == {"max_tokens": 3}
    assert dict(tree["fields"])["prompt_token_ids"] == [1, 2]


def test_changed_names_what_differs_from_the_last_of_the_kind(view):
    arrive(view)
    assert struct_tree(view)["changed"] == []
    view.apply(SchedulerOutput(step=1))
    arrive(view, 1, priority=5)

    assert struct_tree(view)["changed"] == ["request_id", "priority"]


def test_a_decision_begins_with_its_sentence(view):
    arrive(view)
    decision = Decision("r0", Outcome.WAITING, Code.NO_BLOCKS, blocks_needed=3, blocks_free=1)
    view.apply(SchedulerOutput(step=1, decisions=(decision,)))
    (found,) = fields(view)["decisions"]

    assert next(iter(found)) == "why"
    assert found["why"] == "waiting: needs 3 blocks, 1 free"
    assert found["code"] == "no_blocks"
    assert "tokens_granted" not in found


def test_what_is_long_is_cut_and_says_how_much(view):
    tokens = {f"r{n}": n for n in range(500)}
    view.apply(SchedulerOutput(step=1, num_scheduled_tokens=tokens, finished_req_ids=("x",) * 40))
    found = fields(view)

    assert len(found["num_scheduled_tokens"]) == 25
    assert found["num_scheduled_tokens"][CUT] == 476
    assert found["finished_req_ids"][-1] == {CUT: 16}


def test_a_megabyte_of_hostile_text_is_cut(view):
    arrive(view, prompt="\ud800</script>" + "x" * 1_000_000)
    text = fields(view)["prompt"]

    assert len(text) == 200
    assert text.startswith("?</script>x")
    assert text.endswith("…")


def test_all_structs_together_are_bounded(view):
    new = [
        Decision(f"r{n}", Outcome.SCHEDULED, Code.PREFILL, *range(1, 10), f"other{n}", 7, 8)
        for n in range(1000)
    ]
    view.apply(SchedulerOutput(step=1, decisions=tuple(new)))

    assert len(fields(view)["decisions"]) == 25


@pytest.mark.parametrize(
    ("scheduled", "expected"),
    [
        ({}, "The scheduler has decided; the model has not run. 0 requests will run."),
        ({"r0": 2}, "The scheduler has decided; the model has not run. 1 request will run."),
    ],
)
def test_it_says_what_the_scheduler_has_decided(view, scheduled, expected):
    arrive(view)
    assert standing(view) == "r0 has entered the engine; no step has looked at it yet."
    view.apply(SchedulerOutput(step=1, num_scheduled_tokens=scheduled))

    assert standing(view) == expected
    assert boundary_index(view) == 1


def test_it_says_that_tokens_wait(view):
    view.apply(ModelRunnerOutput(step=1, req_ids=("a", "b"), sampled_token_ids=((7,), ())))

    assert standing(view) == "The model has run: 1 token sampled, not taken in yet."


def test_every_stop_of_a_busy_run_has_a_sentence(busy_stream):
    snapshot, structs, _ = busy_stream
    view = EngineView(snapshot)
    said = set()
    for boundary in structs:
        view.apply(boundary)
        said.add(standing(view))
        assert struct_tree(view)["kind"] == type(boundary).__name__

    assert any(" made room for r" in text for text in said)
    assert any(text.endswith("taken the tokens in; r1 finished.") for text in said)
    assert any("has got its last text." in text for text in said)
