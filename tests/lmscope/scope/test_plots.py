"""The figures say what the data frames say, and obey no text."""

from __future__ import annotations

import subprocess
import sys

import plotly.graph_objects as go
import pytest

from lmscope import LLM, SamplingParams, record
from lmscope.scope.plots import hover_text

HOSTILE = '<b onclick="x()">&amp;</b> %{x} $a^2$ <script>alert(1)</script> \u202e\x07'
NAMES = ("timeline", "latency", "blocks_over_time", "hit_rate")


@pytest.fixture(scope="module")
def recording():
    with (
        LLM(
            "s",
            execute="scripted",
            script=lambda request_id, position: 97 + position % 26,
            block_size=4,
            num_kv_blocks=40,
            max_num_batched_tokens=16,
            max_num_seqs=4,
        ) as llm,
        record(llm) as made,
    ):
        params = SamplingParams(max_tokens=20)
        streams = [
            llm.submit(f"{HOSTILE} {number}", params, request_id=f"<i>{number}</i>")
            for number in range(4)
        ]
        for stream in streams:
            stream.wait(200)
    return made


def traces(figure):
    return {trace.name: trace for trace in figure.data}


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_plain_figure_in_which_no_text_acts(recording, name):
    figure = getattr(recording.plot, name)()

    assert type(figure) is go.Figure
    text = figure.to_json().replace("\\u003c", "<").replace("\\u003e", ">")
    assert "<script" not in text
    assert "<i>" not in text
    assert "onclick" not in text or "&lt;b onclick" in text
    assert "$" not in text
    assert "\u202e" not in text
    assert len(text) < 50_000
    assert figure.layout.title.text


def test_the_timeline_has_the_tokens_of_each_step_and_a_lane_per_request(recording):
    steps = recording.frames.steps
    figure = recording.plot.timeline()
    bars = [trace for trace in figure.data if trace.type == "bar" and trace.orientation != "h"]
    by_name = {trace.name: list(trace.y) for trace in bars}

    assert by_name["decode"] == list(steps["decode_tokens"])
    assert by_name["recomputed"] == list(steps["recomputed_tokens"])
    assert by_name["from cache"] == [-n for n in steps["cached_tokens"]]
    assert list(traces(figure)["preemption"].x) == list(steps["step"][steps["preemptions"] > 0])
    assert len(traces(figure)["preemption"].x) > 0
    assert list(figure.layout.yaxis2.ticktext) == [f"&lt;i&gt;{n}&lt;/i&gt;" for n in range(4)]
    lanes = [trace for trace in figure.data if trace.orientation == "h"]
    assert {trace.name for trace in lanes} >= {"waiting", "prefill", "decode", "recompute"}


def test_latency_adds_up_to_the_time_of_each_request(recording):
    requests = recording.frames.requests
    parts = traces(recording.plot.latency())
    total = sum(parts[name].x for name in ("waited", "to the first token", "to the end"))

    assert total == pytest.approx(requests["latency_s"].to_numpy())


def test_blocks_and_hits_are_those_of_the_frames(recording):
    steps, requests = recording.frames.steps, recording.frames.requests
    blocks = traces(recording.plot.blocks_over_time())
    assert list(blocks["used"].y) == list(steps["used_blocks"])
    assert list(blocks["kept"].y) == list(steps["kept_blocks"])
    assert len(blocks["evicted"].x) == (steps["evictions"] > 0).sum()

    hits = traces(recording.plot.hit_rate())
    share = requests["cached_tokens"].sum() / requests["prompt_tokens"].sum()
    assert hits["all so far"].y[-1] == pytest.approx(share)
    assert 0 < share < 1


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_recording_has_empty_figures(name):
    with (
        LLM("s", execute="scripted", script=lambda i, p: 97, num_kv_blocks=4) as llm,
        record(llm) as made,
    ):
        pass
    assert getattr(made.plot, name)().layout.title.text


def test_a_run_of_many_requests_shows_some_lanes_and_says_so():
    with (
        LLM("s", execute="scripted", script=lambda i, p: 97, num_kv_blocks=500) as llm,
        record(llm) as made,
    ):
        llm.generate(["x"] * 70, SamplingParams(max_tokens=1), use_tqdm=False)
    figure = made.plot.timeline()
    assert "60 of 70 requests" in figure.layout.title.text
    assert len(figure.layout.yaxis2.ticktext) == 60


def test_hover_text_is_escaped_visible_and_short():
    assert hover_text("a<b>&$x$") == "a&lt;b&gt;&amp;&#36;x&#36;"
    assert hover_text("\u202e") == "&lt;U+202E&gt;"
    assert hover_text("one\n two") == "one two"
    assert len(hover_text("x" * 1_000_000)) == 80
    assert hover_text("x" * 81)[-1] == "…"
    assert hover_text("x" * 80)[-1] == "x"


def test_reading_a_recording_imports_no_plotly():
    code = "import sys, lmscope.scope.recording; sys.exit('plotly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
