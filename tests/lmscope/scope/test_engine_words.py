"""What runs an engine, in words, and where they stand."""

from __future__ import annotations

import msgspec
import pytest

from lmscope.boundary import EngineInfo
from lmscope.scope import perfetto
from lmscope.scope.engine_words import engine_words, in_flight_words
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.recording import open_recording, record
from lmscope.scope.text_picture import text_picture
from lmscope.scope.view import EngineView

INFO = EngineInfo("m", 4, 10, 8, 64, 100)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({}, ""),
        ({"device": "cpu", "attention_backend": "torch"}, "cpu"),
        ({"device": "cpu", "attention_backend": "triton"}, "cpu, Triton kernels"),
        ({"device": "cuda", "attention_backend": "triton"}, "cuda, Triton kernels"),
        ({"device": "cuda", "attention_backend": "torch"}, "cuda, attention in torch"),
        ({"async_scheduling": True}, "async scheduling"),
        (
            {"device": "cuda", "attention_backend": "triton", "async_scheduling": True},
            "cuda, Triton kernels, async scheduling",
        ),
    ],
)
def test_what_a_source_tells_is_said_and_nothing_else(facts, words):
    assert engine_words(msgspec.structs.replace(INFO, **facts)) == words


def test_a_recording_from_before_reads_as_one_that_does_not_tell():
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(INFO))
    assert not {"device", "attention_backend", "async_scheduling"} & set(old)
    assert engine_words(msgspec.convert(old, EngineInfo)) == ""


def test_frames_pages_and_traces_say_it(tiny_engine, tmp_path):
    engine = tiny_engine()
    engine.info = engine.tap.info = msgspec.structs.replace(
        engine.info, device="cuda", attention_backend="triton", async_scheduling=True
    )
    with record(engine) as recording:
        engine.add("abcd")
        engine.step()
    words = "cuda, Triton kernels, async scheduling"

    assert PictureEncoder(recording.at()).full("live").header["info"]["engine"] == words
    recording.save(tmp_path / "a.lmscope")
    assert open_recording(tmp_path / "a.lmscope").info == engine.info
    recording.to_html(tmp_path / "a.html")
    assert f"<p>tiny ({words}): 1 steps," in (tmp_path / "a.html").read_text("utf-8")
    (name,) = (
        event["args"]["name"]
        for event in perfetto.trace_events(recording)
        if event["name"] == "process_name" and event["pid"] == 1
    )
    assert name == f"engine tiny, {words}"


def test_what_a_file_says_of_its_device_is_text_and_no_markup(tiny_engine, tmp_path):
    engine = tiny_engine()
    engine.info = engine.tap.info = msgspec.structs.replace(engine.info, device="<img src=x>")
    with record(engine) as recording:
        engine.add("abcd")
    recording.to_html(tmp_path / "a.html")

    page = (tmp_path / "a.html").read_text("utf-8")
    assert "<p>tiny (&lt;img src=x&gt;)" in page
    assert "<img" not in page.split("<script")[0]


def test_what_is_in_flight_is_named():
    assert in_flight_words(()) == ""
    assert in_flight_words((4,)).startswith("Step 4 is in flight: the device has run it, and its")
    assert in_flight_words((4, 5)).startswith("Steps 4 to 5 are in flight: the device has run them")


def test_a_picture_in_characters_says_what_is_in_flight(tiny_engine):
    view = EngineView(tiny_engine().snapshot())
    lines = text_picture(view, in_flight=in_flight_words((4,)), width=60).splitlines()

    assert lines[1].startswith("stands   Step 4 is in flight: ")
    assert "in flight" not in text_picture(view)
