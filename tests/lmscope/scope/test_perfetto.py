"""The trace against the rules of Chrome's trace event format (JSON, complete events)."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from lmscope import LLM, SamplingParams, record
from lmscope.boundary import EngineCoreOutputs, SchedulerOutput
from lmscope.scope.recording import open_recording


@pytest.fixture(scope="module")
def recording():
    with (
        LLM(
            "s",
            execute="scripted",
            script=lambda request_id, position: 97 + position % 26,
            block_size=4,
            num_kv_blocks=14,
            max_num_batched_tokens=16,
            max_num_seqs=4,
        ) as llm,
        record(llm) as made,
    ):
        params = SamplingParams(max_tokens=9)
        prompts = [f"Shared beginning, question {number}" for number in range(8)]
        llm.submit("cut", params, request_id='</script>"\u202e').wait(200)
        llm.generate(prompts, params, use_tqdm=False)
    return made


@pytest.fixture(scope="module")
def trace(recording, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    recording.to_perfetto(path)
    assert [p.name for p in path.parent.iterdir()] == ["run.json"]
    return json.loads(path.read_bytes().decode("ascii"))


def of(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_event_has_what_its_phase_needs(trace):
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "i", "C"}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
        assert (type(event["pid"]), type(event["tid"])) == (int, int)
    for event in of(trace, "X"):
        assert type(event["dur"]) is int
        assert event["dur"] > 0 or event["cat"] == "step"
    assert {event["s"] for event in of(trace, "i")} <= {"t", "p", "g"}
    for event in of(trace, "C"):
        assert all(type(value) is int for value in event["args"].values())


def test_times_are_sorted_and_spans_of_a_track_do_not_overlap(trace):
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)
    ends = defaultdict(int)
    for event in of(trace, "X"):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends[track]
        ends[track] = event["ts"] + event["dur"]


def test_every_track_and_process_has_one_name(trace):
    names = defaultdict(list)
    for event in of(trace, "M"):
        names[event["name"], event["pid"], event["tid"]].append(event["args"])
    assert all(len(given) == 1 for given in names.values())
    for event in (*of(trace, "X"), *of(trace, "i")):
        assert ("thread_name", event["pid"], event["tid"]) in names
        assert ("process_name", event["pid"], 0) in names


def test_steps_requests_and_counters_are_those_of_the_recording(trace, recording):
    frames = recording.frames
    steps = [event for event in of(trace, "X") if event["cat"] == "step"]
    assert [event["name"] for event in steps] == [f"step {n}" for n in frames.steps["step"]]
    assert [event["args"]["scheduled tokens"] for event in steps] == list(
        frames.steps["scheduled_tokens"]
    )
    lanes = [event for event in of(trace, "X") if event["cat"] == "request"]
    assert {event["name"] for event in lanes} == {
        "waiting", "prefill", "decode", "preempted", "recompute",
    }  # fmt: skip
    assert (
        sum(event["name"] == "preempted" for event in lanes) == frames.requests["preemptions"].sum()
    )
    evictions = [event for event in of(trace, "i") if event["name"] == "eviction"]
    assert len(evictions) == frames.steps["evictions"].sum()
    boundaries = [
        b for b in recording.boundaries if isinstance(b, SchedulerOutput | EngineCoreOutputs)
    ]
    used = [event["args"] for event in of(trace, "C") if event["name"] == "KV blocks"]
    assert len(used) == len(boundaries)
    assert used[-1] == {
        "used": recording.at().num_used,
        "kept": recording.at().num_kept,
    }
    ends = [e["name"] for e in of(trace, "i") if e["pid"] == 2]
    assert ends == ["finished: length"] * 9


def test_it_holds_no_text(trace):
    assert "Shared beginning" not in json.dumps(trace)


def test_steps_that_overlap_get_tracks_of_their_own(recording, tmp_path, monkeypatch):
    from lmscope.scope import perfetto

    class Overlapping:
        """Of two steps the second begins before the first has ended."""

        snapshot, info, start_time = recording.snapshot, recording.info, 0.0
        boundaries = (
            SchedulerOutput(step=1, time=1.0),
            SchedulerOutput(step=2, time=2.0),
            EngineCoreOutputs(step=1, time=3.0),
            SchedulerOutput(step=3, time=3.0),
            EngineCoreOutputs(step=2, time=4.0),
        )

    events = perfetto.trace_events(Overlapping)
    spans = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("step 1", 1, 1_000_000, 2_000_000),
        ("step 2", 2, 2_000_000, 2_000_000),
        ("step 3", 1, 3_000_000, 1_000_000),
    ]


def test_an_empty_recording_is_a_trace_too(tmp_path, recording):
    with LLM("s", execute="scripted", script=lambda i, p: 97, num_kv_blocks=4) as llm:
        with record(llm) as made:
            pass
        made.save(tmp_path / "empty.lmscope")
    open_recording(tmp_path / "empty.lmscope").to_perfetto(tmp_path / "empty.json")
    events = json.loads((tmp_path / "empty.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}
