"""Recordings: what was kept can be saved, opened and looked at, and damage is told."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
import zlib

import pytest

from lmscope.boundary import EngineCoreRequest, EngineSnapshot, SchedulerOutput
from lmscope.errors import RecordingError
from lmscope.scope import record_log, recording_file
from lmscope.scope.recording import open_recording, record
from lmscope.scope.view import EngineView, differences


def run(engine, count=12):
    for number in range(count):
        engine.add("abcabcab" + "cab"[: number % 4], max_tokens=9)
        engine.step()
    engine.run()
    engine.step()


@pytest.fixture
def recorded(tiny_engine):
    """A closed recording of a run with preemptions, and the structs that it must hold."""
    engine = tiny_engine(num_blocks=11, seed=3)
    structs = []
    engine.tap.follow(structs.append)
    with record(engine) as recording:
        run(engine)
    return recording, structs


@pytest.fixture
def saved(recorded, tmp_path):
    path = tmp_path / "run.lmscope"
    recorded[0].save(path)
    return path


# -- recording ---------------------------------------------------------------------------


def test_it_holds_every_struct_in_order(recorded):
    recording, structs = recorded

    assert list(recording.boundaries) == structs
    assert len(recording) == len(recording.boundaries) == len(structs)
    assert recording.boundaries[0] == structs[0]
    assert recording.boundaries[-1] == structs[-1]
    assert recording.boundaries[3:6] == structs[3:6]
    with pytest.raises(IndexError):
        recording.boundaries[len(structs)]


def test_it_grows_while_it_is_open_and_can_be_read_meanwhile(tiny_engine):
    engine = tiny_engine()
    with record(engine) as recording:
        assert recording.is_open
        engine.add("abc")
        engine.step()
        assert recording.steps == range(2)
        assert recording.at().step == 1
        engine.step()
        assert recording.at().step == 2
    engine.step()

    assert not recording.is_open
    assert recording.steps == range(3)
    assert len(recording.frames.steps) == 2


def test_closing_twice_is_fine(tiny_engine):
    engine = tiny_engine()
    recording = record(engine)
    recording.close()
    recording.close()
    engine.add("abc")

    assert len(recording) == 0
    assert not engine.tap.is_live


def test_what_arrives_after_closing_is_dropped():
    log = record_log.RecordLog(1000)
    log.append(b"one", 1, 1.0)
    log.close()
    log.append(b"two", 2, 2.0)

    assert list(log.read(0, len(log))) == [b"one"]


def test_a_late_struct_of_an_earlier_step_counts_where_it_came():
    log = record_log.RecordLog(1000)
    for step in (1, 2, 1, 3):
        log.append(b"x", step, float(step))

    assert list(log.steps) == [1, 2, 2, 3]
    assert list(log.times) == [1.0, 2.0, 2.0, 3.0]


def test_a_recording_that_nobody_holds_stops(tiny_engine):
    engine = tiny_engine()
    recording = record(engine)
    assert engine.tap.is_live
    del recording
    gc.collect()

    assert not engine.tap.is_live


def test_it_begins_in_the_middle_of_a_run(tiny_engine):
    engine = tiny_engine()
    engine.add("abcdefgh", max_tokens=12)
    for _ in range(4):
        engine.step()
    with record(engine) as recording:
        engine.run()
        engine.step()

    assert recording.steps[0] == 4
    assert recording.at(step=4).running == ("r1",)
    assert differences(recording.at(), engine.snapshot()) == []


def test_what_has_no_tap_cannot_be_recorded():
    with pytest.raises(TypeError, match="has no tap"):
        record(object())


# -- at ------------------------------------------------------------------------------------


def expected_views(recording):
    """For each step the state before the first struct of the next, folded from scratch."""
    view, views = EngineView(recording.snapshot), {}
    for boundary in recording.boundaries:
        if boundary.step > view.step:
            views[view.step] = view.copy()
        view.apply(boundary)
    views[view.step] = view
    return views


def test_at_gives_the_state_after_each_step_in_any_order(recorded):
    recording, _ = recorded
    views = expected_views(recording)

    assert list(recording.steps) == sorted(views)
    for step in [*recording.steps, *reversed(recording.steps), 5, 30, 6]:
        found = recording.at(step=step)
        assert found.step == step
        assert found.snapshot() == views[step].snapshot()
        assert found.decisions == views[step].decisions
        assert found.totals == views[step].totals


def test_a_view_of_step_1_is_unchanged_at_step_9(recorded):
    recording, _ = recorded
    first = recording.at(step=1)
    snapshot, texts = first.snapshot(), first.token_texts("r1")
    for step in range(2, 10):
        recording.at(step=step)

    assert first.snapshot() == snapshot
    assert first.token_texts("r1") == texts


def test_changing_a_view_changes_nothing_in_the_recording(recorded):
    recording, structs = recorded
    view = recording.at(step=3)
    before = recording.at(step=3).snapshot()
    for boundary in structs:
        if boundary.step > 3:
            view.apply(boundary)

    assert recording.at(step=3).snapshot() == before


def test_a_look_costs_a_bounded_number_of_folds(tiny_engine, monkeypatch):
    engine = tiny_engine(num_blocks=60)
    with record(engine) as recording:
        for _ in range(40):
            engine.add("abcabc", max_tokens=10)
            for _ in range(10):
                engine.step()
    recording.at()
    folds = []
    apply = EngineView.apply
    monkeypatch.setattr(EngineView, "apply", lambda view, b: (folds.append(1), apply(view, b)))
    per_step = len(recording) / len(recording.steps)
    for step in (399, 37, 200, 1, 333):
        folds.clear()
        recording.at(step=step)
        assert len(folds) <= 66 * 2 * per_step
    folds.clear()
    recording.at(step=334)

    assert len(folds) <= 5
    assert len(recording._views._stops) <= 400 / 64 + 1


def test_copies_along_a_long_recording_are_few(tiny_engine, monkeypatch):
    from lmscope.scope import timetable

    monkeypatch.setattr(timetable, "_MAX_STOPS", 4)
    monkeypatch.setattr(timetable, "_STEPS_BETWEEN_STOPS", 4)
    engine = tiny_engine(num_blocks=60)
    with record(engine) as recording:
        for _ in range(20):
            engine.add("abcabc", max_tokens=10)
            for _ in range(10):
                engine.step()
    views = expected_views(recording)
    for step in (200, 3, 150, 90, 91):
        assert recording.at(step=step).snapshot() == views[step].snapshot()

    assert len(recording._views._stops) <= 5


@pytest.mark.parametrize("step", [-1, 99_999])
def test_a_missing_step_names_the_range(recorded, step):
    recording, _ = recorded
    last = recording.steps[-1]
    with pytest.raises(RecordingError, match=rf"step is {step}; .* steps 0 to {last}"):
        recording.at(step=step)


def test_at_takes_a_time_in_seconds_since_the_start(recorded):
    recording, structs = recorded
    for boundary in structs[::7]:
        # a moment after it, before the next
        view = recording.at(time=boundary.time - recording.start_time + 0.0005)
        assert view.time == boundary.time

    assert recording.at(time=0.0).time == pytest.approx(recording.start_time)
    assert recording.at(time=1e9).step == recording.steps[-1]
    with pytest.raises(RecordingError, match="time is -1"):
        recording.at(time=-1)


def test_at_takes_one_argument_of_the_right_type(recorded):
    recording, _ = recorded
    with pytest.raises(TypeError, match="not both"):
        recording.at(3, time=1.0)
    with pytest.raises(TypeError, match="takes an integer"):
        recording.at("3")


def test_why_then_and_at_last(recorded):
    recording, _ = recorded

    assert "prefill: 8 tokens" in str(recording.why("r1", step=1))
    with pytest.raises(RecordingError, match="'r12', which is not known at step 1; known: r1"):
        recording.why("r12", step=1)


# -- saving and opening --------------------------------------------------------------------


def test_save_and_open_give_the_same_recording(recorded, saved):
    recording, structs = recorded
    opened = open_recording(saved)

    assert list(opened.boundaries) == structs
    assert opened.snapshot == recording.snapshot
    assert opened.info == recording.info
    assert opened.steps == recording.steps
    assert opened.at(step=7).snapshot() == recording.at(step=7).snapshot()
    assert not opened.is_open
    assert opened.damage is None
    assert "12 requests" in repr(opened)


def test_save_can_replace_a_file_and_leaves_nothing_beside_it(recorded, tmp_path):
    recording, structs = recorded
    path = tmp_path / "run.lmscope"
    path.write_text("something else")
    recording.save(path)

    assert list(open_recording(path).boundaries) == structs
    assert [p.name for p in tmp_path.iterdir()] == ["run.lmscope"]


def test_a_failing_save_leaves_the_old_file(recorded, tmp_path, monkeypatch):
    recording, _ = recorded
    path = tmp_path / "run.lmscope"
    path.write_text("old")

    def fail(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr("lmscope.scope.recording.write_chunk", fail)
    with pytest.raises(OSError, match="no space"):
        recording.save(path)

    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.lmscope"]


def test_an_opened_recording_can_be_saved_onto_itself(saved, recorded):
    opened = open_recording(saved)
    opened.save(saved)

    assert list(opened.boundaries) == recorded[1]
    assert list(open_recording(saved).boundaries) == recorded[1]


def test_structs_can_be_read_when_only_they_are_held(saved, recorded):
    boundaries = open_recording(saved).boundaries
    gc.collect()

    assert list(boundaries) == recorded[1]


def test_files_are_closed_without_a_warning(saved):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_recording(saved)
        gc.collect()


def test_opening_imports_no_torch_and_no_engine(saved):
    code = (
        "import sys; from lmscope.scope.recording import open_recording; "
        f"r = open_recording({str(saved)!r}); r.at(step=3).why('r1'); "
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'pandas') "
        "or m.startswith(('lmscope.engine', 'lmscope.execute', 'lmscope.models'))]; "
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- a file that is written as it goes --------------------------------------------------------


def test_a_file_is_written_as_it_goes(tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(record_log, "_CHUNK_BYTES", 2000)
    path = tmp_path / "run.lmscope"
    engine = tiny_engine()
    recording = record(engine, path)
    run(engine, 6)
    before = open_recording(path, partial=True)
    assert 0 < len(before) < len(recording)
    assert "no end mark" in before.damage
    assert "partial" in repr(before)
    recording.close()

    after = open_recording(path)
    assert list(after.boundaries) == list(recording.boundaries)
    assert differences(recording.at(), engine.snapshot()) == []


def test_a_file_gets_what_there_is_every_second(tiny_engine, tmp_path):
    path = tmp_path / "run.lmscope"
    engine = tiny_engine()
    recording = record(engine, path)
    engine.add("abc")
    engine.clock += 2.0
    engine.step()

    assert len(open_recording(path, partial=True)) >= 2
    recording.close()


def test_a_process_that_dies_leaves_a_file_that_opens(tmp_path, saved):
    """Killed without a chance to close: all but the last second is there."""
    path = tmp_path / "killed.lmscope"
    code = f"""
import os
from lmscope.scope import record_log
from lmscope.scope.recording import open_recording, record
from lmscope.tap import Tap
record_log._CHUNK_BYTES = 3000
source = open_recording({str(saved)!r})
class Player:
    tap = Tap(source.info)
recording = record(Player, {str(path)!r})
for boundary in source.boundaries:
    Player.tap(boundary)
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    whole, kept = open_recording(saved), open_recording(path, partial=True)

    assert 0 < len(kept) < len(whole)
    assert list(kept.boundaries) == whole.boundaries[: len(kept)]
    with pytest.raises(RecordingError, match="no end mark"):
        open_recording(path)


def test_a_process_that_ends_without_closing_leaves_a_whole_file(tmp_path, saved):
    path = tmp_path / "ended.lmscope"
    code = f"""
from lmscope.scope.recording import open_recording, record
from lmscope.tap import Tap
source = open_recording({str(saved)!r})
class Player:
    tap = Tap(source.info)
recording = record(Player, {str(path)!r})
for boundary in source.boundaries:
    Player.tap(boundary)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)

    assert list(open_recording(path).boundaries) == list(open_recording(saved).boundaries)


def test_a_path_that_cannot_be_written_is_an_error_at_once(tiny_engine, tmp_path):
    engine = tiny_engine()
    with pytest.raises(FileNotFoundError):
        record(engine, tmp_path / "missing" / "run.lmscope")

    assert not engine.tap.is_live


def test_a_full_disk_ends_the_recording_and_not_the_engine(tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(record_log, "_CHUNK_BYTES", 2000)
    engine = tiny_engine()
    recording = record(engine, tmp_path / "run.lmscope")
    engine.add("abc")
    engine.step()

    def fail(*_args, **_options):
        raise OSError("no space left on device")

    monkeypatch.setattr(record_log, "write_chunk", fail)
    run(engine)

    assert isinstance(recording.error, OSError)
    assert not recording.is_open
    assert "ended by OSError" in repr(recording)
    assert recording.at().step >= 1
    recording.save(tmp_path / "rest.lmscope")
    assert len(open_recording(tmp_path / "rest.lmscope")) == len(recording)


# -- memory ------------------------------------------------------------------------------------


def test_beyond_its_limit_a_recording_lies_in_a_temporary_file(tiny_engine, monkeypatch):
    monkeypatch.setattr(record_log, "_CHUNK_BYTES", 2000)
    engine = tiny_engine(num_blocks=11, seed=3)
    structs = []
    engine.tap.follow(structs.append)
    most = 0
    with record(engine, memory_bytes=8000) as recording:
        log = recording._log
        for _ in range(12):
            engine.add("abcabcab", max_tokens=9)
            engine.step()
            in_memory = sum(
                sum(map(len, chunk))
                for chunk in [*log._chunks, tuple(log._open)]
                if not isinstance(chunk, recording_file.Chunk)
            )
            most = max(most, in_memory)
        engine.run()

    assert most <= 8000 + 2000 + 2000
    assert log._file is not None
    assert list(recording.boundaries) == structs
    assert recording.at(step=5).step == 5
    assert recording.boundaries[17] == structs[17]


def test_small_recordings_touch_no_file(recorded):
    assert recorded[0]._log._file is None


def test_readers_and_the_engine_may_be_on_two_threads(tiny_engine, monkeypatch):
    monkeypatch.setattr(record_log, "_CHUNK_BYTES", 500)
    engine = tiny_engine()
    problems = []
    with record(engine, memory_bytes=2000) as recording:
        done = threading.Event()

        def read():
            while not done.is_set():
                try:
                    recording.at()
                    list(recording.boundaries)
                except Exception as error:
                    problems.append(error)
                    return

        reader = threading.Thread(target=read)
        reader.start()
        run(engine, 30)
        done.set()
        reader.join()

    assert problems == []
    assert differences(recording.at(), engine.snapshot()) == []


# -- damage --------------------------------------------------------------------------------------


def chunked_file(recording, path, monkeypatch, structs_per_chunk=50):
    monkeypatch.setattr("lmscope.scope.recording._SAVED_CHUNK_STRUCTS", structs_per_chunk)
    recording.save(path)
    return path.read_bytes()


def test_a_cut_file_is_refused_with_the_byte_and_kept_in_part(recorded, tmp_path, monkeypatch):
    recording, structs = recorded
    path = tmp_path / "cut.lmscope"
    data = chunked_file(recording, path, monkeypatch)
    path.write_bytes(data[:-1500])
    where = rf"at byte \d+: a record of \d+ bytes begins there and .* byte {len(data) - 1500}"
    with pytest.raises(RecordingError, match=where + r".*partial=True.* keeps the \d+ structs"):
        open_recording(path)
    part = open_recording(path, partial=True)

    assert 50 <= len(part) < len(structs)
    assert len(part) % 50 == 0
    assert list(part.boundaries) == structs[: len(part)]
    assert str(path) in part.damage
    assert part.at().step == part.steps[-1]


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_changed_byte_is_found_with_its_place(recorded, tmp_path, monkeypatch, place):
    recording, structs = recorded
    path = tmp_path / "bad.lmscope"
    data = bytearray(chunked_file(recording, path, monkeypatch))
    data[int(len(data) * place)] ^= 0x55
    path.write_bytes(bytes(data))
    with pytest.raises(RecordingError, match=r"damaged at byte \d+: the checksum is wrong"):
        open_recording(path)
    part = open_recording(path, partial=True)

    assert list(part.boundaries) == structs[: len(part)]


def test_every_cut_is_refused_and_none_makes_trouble(recorded, tmp_path, monkeypatch):
    recording, structs = recorded
    path = tmp_path / "cut.lmscope"
    data = chunked_file(recording, path, monkeypatch, 200)
    for length in [*range(40), *range(40, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(RecordingError, match=r"byte \d+|no lmscope recording"):
            open_recording(path)
        try:
            part = open_recording(path, partial=True)
        except RecordingError:
            continue  # the header itself is cut
        assert list(part.boundaries) == structs[: len(part)]


def test_what_is_no_recording_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("just some notes")
    for partial in (False, True):
        with pytest.raises(RecordingError, match=r"notes.txt is no lmscope recording"):
            open_recording(path, partial=partial)
    with pytest.raises(FileNotFoundError):
        open_recording(tmp_path / "missing.lmscope")


def test_a_newer_format_is_refused_by_name(saved, monkeypatch):
    data = bytearray(saved.read_bytes())
    data[8] = recording_file.FORMAT_VERSION + 1
    saved.write_bytes(bytes(data))
    from lmscope import __version__

    with pytest.raises(RecordingError, match=r"format 2, written by lmscope (.*); .* up to 1") as e:
        open_recording(saved)
    assert __version__ in str(e.value)
    # one that has changed so much that its header cannot be read
    saved.write_bytes(bytes(data[:10]) + b"something else")
    with pytest.raises(RecordingError, match="format 2, written by another lmscope; "):
        open_recording(saved)


def test_an_older_format_opens(saved, monkeypatch, recorded):
    """Fields that a later version adds have defaults, so what lacks them reads as before."""
    monkeypatch.setattr(recording_file, "FORMAT_VERSION", recording_file.FORMAT_VERSION + 1)

    assert list(open_recording(saved).boundaries) == recorded[1]


def test_a_length_that_lies_does_not_fill_the_memory(saved, monkeypatch):
    monkeypatch.setattr(recording_file, "_MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(RecordingError, match="unpacks to more than 1000 bytes"):
        open_recording(saved)


def test_compressed_data_that_stops_early_is_refused(tmp_path):
    path = tmp_path / "odd.lmscope"
    with open(path, "wb") as file:
        recording_file.write_preamble(file, EngineSnapshot(info=_info(), free_queue=(1,)))
        packed = zlib.compress(b"\x01\x00\x00\x00x" * 100)[:-4]
        recording_file._write_record(file, b"\x01\x00\x00\x00" + packed)
        recording_file.write_end(file)
    with pytest.raises(RecordingError, match="the compressed data is incomplete"):
        open_recording(path)


def test_an_unknown_struct_is_refused_with_its_place(tmp_path):
    import msgspec

    info = EngineSnapshot(info=_info(), free_queue=(1,))
    path = tmp_path / "odd.lmscope"
    with open(path, "wb") as file:
        recording_file.write_preamble(file, info)
        odd = msgspec.msgpack.encode({"type": "Surprise", "step": 1})
        recording_file.write_chunk(file, [odd], 1)
        recording_file.write_end(file)
    with pytest.raises(RecordingError, match=r"unknown struct 'Surprise' at byte \d+"):
        open_recording(path)


def _info():
    from lmscope.boundary import EngineInfo

    return EngineInfo(
        model="m",
        block_size=4,
        num_blocks=2,
        max_num_seqs=1,
        max_num_batched_tokens=4,
        max_model_len=8,
    )


# -- redacted ------------------------------------------------------------------------------------


def test_a_redacted_recording_holds_no_text_and_no_token(tiny_engine, tmp_path):
    engine = tiny_engine(num_blocks=20)
    secret = "swordfish swordfish"
    engine.add("before it began", max_tokens=9)
    engine.step()
    with record(engine) as recording:
        engine.add(secret, max_tokens=9)
        engine.add(secret + "!", max_tokens=9)
        engine.run()
        engine.step()
    clean = recording.redact()
    path = tmp_path / "clean.lmscope"
    clean.save(path)
    everything = repr([clean.snapshot, *clean.boundaries])

    assert "sword" in repr(list(recording.boundaries))
    assert "sword" not in everything
    assert "began" not in everything
    tokens = {t for b in recording.boundaries if isinstance(b, EngineCoreRequest)
              for t in b.prompt_token_ids}  # fmt: skip
    seen = {t for b in clean.boundaries if isinstance(b, EngineCoreRequest)
            for t in b.prompt_token_ids}  # fmt: skip
    assert min(tokens) > max(seen)
    hashes = {e.block_hash for b in recording.boundaries if isinstance(b, SchedulerOutput)
              for e in b.kv_events if hasattr(e, "block_hash")}  # fmt: skip
    hashes |= {block.block_hash for block in recording.snapshot.blocks} - {None}
    assert not any(str(h) in everything for h in hashes)
    assert recording.snapshot.requests[0].text
    assert clean.snapshot.requests[0].text == ""
    assert any(request.text for request in recording.at().requests.values())
    assert not any(request.text for request in clean.at().requests.values())


def test_a_redacted_recording_shows_the_same_sharing_and_counts(recorded):
    recording, _ = recorded
    clean = recording.redact()

    assert clean.steps == recording.steps
    for step in (1, 9, recording.steps[-1]):
        was, now = recording.at(step=step), clean.at(step=step)
        assert [b.owners for b in was.blocks] == [b.owners for b in now.blocks]
        assert list(was.free_queue) == list(now.free_queue)
        assert was.totals == now.totals
        assert was.decisions == now.decisions
        for block in was.blocks:
            same = {b.block_id for b in was.blocks if b.token_ids == block.token_ids}
            mine = now.blocks[block.block_id].token_ids
            assert same == {b.block_id for b in now.blocks if b.token_ids == mine}
    # the original is what it was
    assert recording.at().requests["r1"].prompt == "abcabcab"


def test_a_redacted_recording_hides_where_the_model_lies(tiny_engine):
    import msgspec

    engine = tiny_engine()
    engine.info = msgspec.structs.replace(engine.info, model="/home/jane/models/tiny")
    with record(engine) as recording:
        engine.add("abc")

    assert recording.redact().info.model == "tiny"
