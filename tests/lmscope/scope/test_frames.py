"""Data frames: their columns, and numbers that agree with the run and with each other."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from lmscope.boundary import (
    BlockAllocated,
    BlockFreed,
    BlockRemoved,
    BlockStored,
    EngineCoreOutputs,
    EngineInfo,
    EngineSnapshot,
    ModelRunnerOutput,
    SchedulerOutput,
)
from lmscope.decisions import Code
from lmscope.scope.frames import Frames
from lmscope.scope.recording import record

# The frames that every recording has rows for.
NAMES = ("steps", "requests", "blocks", "tokens", "decisions")


@pytest.fixture
def recorded(tiny_engine):
    engine = tiny_engine(num_blocks=11, seed=3)
    with record(engine) as recording:
        for number in range(12):
            engine.add("abcabcab" + "cab"[: number % 4], max_tokens=9)
            engine.step()
        engine.run()
        engine.step()
    return recording


@pytest.mark.parametrize("name", NAMES)
def test_every_column_is_documented_and_every_frame_is_plain(recorded, name):
    frame = getattr(recorded.frames, name)
    documentation = getattr(Frames, name).__doc__

    assert type(frame) is pd.DataFrame
    assert len(frame)
    if name != "decisions":
        for column in frame.columns:
            assert column in documentation


@pytest.mark.parametrize("name", [*NAMES, "attention"])
def test_the_page_on_frames_lists_the_same_columns(recorded, name):
    text = (Path(__file__).parents[3] / "docs" / "frames.md").read_text("utf-8")
    section = text.split(f"\n## {name}: ")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    listed = [column for row in rows for column in re.findall(r"`(\w+)`", row)]

    assert sorted(listed) == sorted(getattr(recorded.frames, name).columns)


@pytest.mark.parametrize("name", [*NAMES, "attention"])
def test_an_empty_recording_has_the_same_columns(tiny_engine, recorded, name):
    with record(tiny_engine()) as empty:
        pass
    frame = getattr(empty.frames, name)

    assert len(frame) == 0
    assert list(frame.columns) == list(getattr(recorded.frames, name).columns)


def test_steps_agree_with_the_structs_and_the_views(recorded):
    steps = recorded.frames.steps
    outputs = {b.step: b for b in recorded.boundaries if isinstance(b, SchedulerOutput)}
    ends = {b.step: b for b in recorded.boundaries if isinstance(b, EngineCoreOutputs)}

    assert list(steps.step) == list(outputs)
    for row in steps.itertuples():
        output, view = outputs[row.step], recorded.at(step=row.step)
        assert row.scheduled_tokens == output.total_num_scheduled_tokens
        assert row.scheduled_tokens == (
            row.prefill_tokens + row.decode_tokens + row.recomputed_tokens
        )
        assert row.preemptions == len(output.preempted_req_ids)
        assert row.step_s == pytest.approx(ends[row.step].time - output.time)
        assert row.time_s == pytest.approx(output.time - recorded.start_time)
        assert (row.running, row.used_blocks, row.kept_blocks, row.empty_blocks) == (
            view.num_running,
            view.num_used,
            view.num_kept,
            view.num_empty,
        )
        assert row.used_blocks + row.kept_blocks + row.empty_blocks == 10
        assert (row.hits, row.evictions) == (len(view.hits), len(view.evicted))
    assert steps.preemptions.sum() > 0
    assert steps.recomputed_tokens.sum() > 0
    assert steps.cached_tokens.sum() > 0


def test_frames_agree_with_each_other(recorded):
    frames = recorded.frames
    steps, requests, blocks = frames.steps, frames.requests, frames.blocks

    assert steps.output_tokens.sum() == requests.output_tokens.sum() == len(frames.tokens)
    assert steps.preemptions.sum() == requests.preemptions.sum()
    assert steps.recomputed_tokens.sum() == requests.recomputed_tokens.sum()
    assert steps.hits.sum() == (blocks.event == "touched").sum()
    removed = blocks[blocks.event == "removed"]
    assert steps.evictions.sum() == removed.request_id.notna().sum() > 0
    assert len(frames.decisions) == sum(len(recorded.at(step=s).decisions) for s in steps.step)


def test_requests_have_their_milestones(recorded):
    requests = recorded.frames.requests
    view = recorded.at()

    assert list(requests.request_id) == list(view.requests)
    assert (requests.finish_reason == "length").all()
    assert (requests.output_tokens == 9).all()
    assert (requests.ttft_s > 0).all()
    assert (requests.ttft_s <= requests.latency_s).all()
    assert (requests.waited_s <= requests.ttft_s).all()
    assert (requests.first_token_step <= requests.finish_step).all()
    assert str(requests.finish_step.dtype) == "Int64"
    assert requests.text[0] == view.requests["r1"].text
    assert requests.prompt[1] == "abcabcabc"


def test_requests_say_how_long_they_waited_and_for_what(recorded):
    frames = recorded.frames
    ends = [*frames.steps.time_s[1:], recorded.at().time - recorded.start_time]
    lengths = dict(zip(frames.steps.step, ends - frames.steps.time_s, strict=True))
    waiting = frames.decisions.query("outcome == 'waiting'")
    requests = frames.requests.set_index("request_id")

    for request_id, request in requests.iterrows():
        mine = waiting[waiting.request_id == request_id]
        for code in Code:
            if f"{code}_steps" in requests:
                steps = mine.step[mine.code == str(code)]
                assert request[f"{code}_steps"] == len(steps)
                assert request[f"{code}_s"] == pytest.approx(sum(lengths[step] for step in steps))
    counted = requests[[f"{code}_steps" for code in set(waiting.code)]]
    assert counted.to_numpy().sum() == len(waiting) > 0
    assert {"no_blocks", "behind", "after_preemption"} <= set(waiting.code)


def test_waiting_ends_with_the_request_or_the_recording(tiny_engine):
    engine = tiny_engine(max_num_seqs=1)
    with record(engine) as recording:
        engine.add("abcd")
        engine.add("abcd")
        engine.add("abcd")
        engine.step()
        engine.step()
        engine.abort("r2")
    requests = recording.frames.requests.set_index("request_id")
    first, second = recording.frames.steps.time_s

    assert requests.seats_steps["r2"] == 2
    assert requests.seats_s["r2"] == pytest.approx(requests.finish_s["r2"] - first)
    assert requests.behind_steps["r3"] == 2
    assert requests.behind_s["r3"] == pytest.approx(
        recording.at().time - recording.start_time - first
    )
    assert requests.seats_steps["r1"] == 0
    assert second > first


def test_a_live_request_has_no_value_where_there_is_none(tiny_engine):
    engine = tiny_engine()
    with record(engine) as recording:
        engine.add("abc")
    (row,) = recording.frames.requests.itertuples()

    assert row.status == "waiting"
    assert row.finish_reason is None or pd.isna(row.finish_reason)
    assert row.first_scheduled_step is pd.NA
    assert pd.isna(row.ttft_s)
    assert row.cached_tokens == 0


def test_blocks_tell_the_history_of_a_block(recorded):
    blocks = recorded.frames.blocks
    of_one = blocks[blocks.block_id == 1]

    assert set(blocks.event) == {"allocated", "touched", "stored", "freed", "removed"}
    assert of_one.event.iloc[0] == "allocated"
    removed = blocks[blocks.event == "removed"]
    stored = blocks[blocks.event == "stored"]
    # each eviction names the content that was stored there last
    for row in removed.itertuples():
        before = stored[(stored.block_id == row.block_id) & (stored.index < row.Index)]
        assert before.block_hash.iloc[-1] == row.block_hash
        assert before.request_id.iloc[-1] == row.stored_by
        assert before.step.iloc[-1] == row.stored_step
    assert blocks.block_hash.dropna().str.fullmatch("[0-9a-f]{16}").all()


def test_content_that_comes_and_goes_within_a_step_has_its_storer():
    info = EngineInfo(
        model="m",
        block_size=2,
        num_blocks=3,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=8,
    )
    events = (
        BlockAllocated(1, "a"),
        BlockStored(1, "a", 7, None, (1, 2), 0),
        BlockFreed(1, "a"),
        BlockRemoved(1, 7, "b"),
        BlockAllocated(1, "b"),
    )
    snapshot = EngineSnapshot(info=info, free_queue=(1, 2))
    blocks = Frames(snapshot, [SchedulerOutput(step=4, kv_events=events)]).blocks
    removed = blocks[blocks.event == "removed"].iloc[0]

    assert (removed.stored_by, removed.stored_step, removed.request_id) == ("a", 4, "b")


def test_a_reset_is_a_row_of_its_own(tiny_engine):
    engine = tiny_engine()
    with record(engine) as recording:
        engine.reset()
        engine.step()
    (row,) = recording.frames.blocks.itertuples()

    assert row.event == "cleared"
    assert row.block_id is pd.NA


def test_tokens_have_text_time_and_logprob(recorded):
    tokens = recorded.frames.tokens
    mine = tokens[tokens.request_id == "r2"].reset_index()
    request = recorded.at().requests["r2"]

    assert list(mine.position) == list(range(9))
    assert list(mine.token_id) == request.output_token_ids
    assert "".join(mine.text) == request.text
    assert (mine.logprob == -0.5).all()
    assert (mine["rank"] == 2).all()
    assert mine.latency_s[0] == pytest.approx(mine.time_s[0] - (
        request.arrival_time - recorded.start_time))  # fmt: skip
    assert mine.latency_s[1] == pytest.approx(mine.time_s[1] - mine.time_s[0])


def test_decisions_carry_the_sentence(recorded):
    decisions = recorded.frames.decisions
    row = decisions[(decisions.step == 1) & (decisions.request_id == "r1")].iloc[0]

    assert (row.outcome, row.code) == ("scheduled", "prefill")
    assert row.why == "prefill: 8 tokens"
    assert decisions.why.notna().all()


def test_changing_a_frame_changes_nothing_else(recorded):
    frame = recorded.frames.steps
    frame["step"] = 0

    assert list(recorded.frames.steps.step) == list(range(1, len(recorded.frames.steps) + 1))


def test_an_id_that_came_twice_has_two_rows(tiny_engine):
    engine = tiny_engine()
    with record(engine) as recording:
        engine.add("abc", request_id="same", max_tokens=2)
        engine.run()
        engine.add("abc", request_id="same", max_tokens=3)
        engine.run()
    requests = recording.frames.requests

    assert list(requests.request_id) == ["same", "same"]
    assert list(requests.output_tokens) == [2, 3]
    assert list(recording.frames.tokens.position) == [0, 1, 0, 1, 2]


def test_attention_has_a_row_per_step_request_and_block(tiny_engine):
    engine = tiny_engine(num_blocks=20)
    with record(engine) as plain:
        for prompt in ("abcdefg", "abcdxyz"):
            engine.add(prompt, max_tokens=8)
            engine.step()
    shares = {"r1": (0.75, 0.25), "r2": (0.5, 0.5)}
    structs = [
        msgspec.structs.replace(
            boundary, attention_mass={i: shares[i] for i in boundary.req_ids if i in shares}
        )
        if isinstance(boundary, ModelRunnerOutput)
        else boundary
        for boundary in plain.boundaries
    ]
    frame = Frames(plain.snapshot, structs).attention

    assert type(frame) is pd.DataFrame
    for column in frame.columns:
        assert column in Frames.attention.__doc__
    last = frame[frame.step == 2]
    assert sorted(last.request_id.unique()) == ["r1", "r2"]
    for request_id, rows in last.groupby("request_id"):
        assert tuple(rows.block_id) == tuple(plain.at().requests[request_id].block_ids[:2])
        assert tuple(rows.share) == shares[request_id]
    assert len(frame[frame.step == 1]) == 2
    assert len(plain.frames.attention) == 0, "nobody measured"
