"""Attention that somebody measures: in the view, and in the frames of the picture."""

from __future__ import annotations

import msgspec
import pytest

from lmscope.boundary import BlockAllocated, BlockFreed, ModelRunnerOutput, SchedulerOutput
from lmscope.scope.frames import Frames
from lmscope.scope.picture import PictureEncoder
from lmscope.scope.recording import record
from lmscope.scope.view import EngineView


@pytest.fixture
def two_requests(tiny_engine):
    """The structs of a step of two requests that share the first of two blocks each."""
    engine = tiny_engine(num_blocks=20)
    structs = []
    snapshot, _ = engine.tap.follow(structs.append)
    engine.add("abcdefg", max_tokens=8)
    engine.step()
    engine.add("abcdxyz", max_tokens=8)
    engine.step()
    return snapshot, structs


def fold(snapshot, structs, mass):
    """The view after the last model output, which says `mass`."""
    view = EngineView(snapshot)
    *_, last = (i for i, each in enumerate(structs) if isinstance(each, ModelRunnerOutput))
    for struct in structs[:last]:
        view.apply(struct)
    view.apply(msgspec.structs.replace(structs[last], attention_mass=mass))
    return view, structs[last + 1 :]


def test_a_block_has_its_part_of_the_attention_of_all_requests(two_requests):
    view, rest = fold(*two_requests, {"r1": (0.75, 0.25), "r2": (0.5, 0.5)})
    first, second = (view.requests[i].block_ids for i in ("r1", "r2"))

    assert first[0] == second[0], "they share a block"
    assert view.attention == {first[0]: 0.625, first[1]: 0.125, second[1]: 0.25}
    other = view.copy()
    for struct in rest:
        view.apply(struct)
    assert view.attention == other.attention, "it stays until the next step's"


def test_attention_goes_with_the_first_step_that_nobody_measures(two_requests):
    view, _ = fold(*two_requests, {"r1": (0.75, 0.25)})
    copy = view.copy()
    view.apply(ModelRunnerOutput(step=view.step + 1, time=view.time))  # a step without tokens
    assert view.attention
    view.apply(ModelRunnerOutput(step=view.step + 1, time=view.time, req_ids=("r1",)))

    assert view.attention == {}
    assert copy.attention


def test_with_overlapping_steps_what_the_next_one_took_is_left_out(two_requests):
    snapshot, structs = two_requests
    view, _ = fold(snapshot, structs, {})
    gone = tuple(BlockFreed(i, "r2") for i in view.requests["r2"].block_ids)
    last = [b for b in structs if isinstance(b, ModelRunnerOutput)][-1]
    following = SchedulerOutput(
        step=view.step + 1, time=view.time, preempted_req_ids=("r2",), kv_events=gone
    )
    late = msgspec.structs.replace(last, attention_mass={"r1": (0.75, 0.25), "r2": (0.5, 0.5)})
    view.apply(following)
    view.apply(late)

    assert view.attention == dict(zip(view.requests["r1"].block_ids, (0.75, 0.25), strict=True))
    frame = Frames(snapshot, [*structs[: structs.index(last)], following, late]).attention
    assert set(frame.request_id) == {"r1"}


def test_an_id_that_came_again_gets_no_attention_of_the_request_before_it(tiny_engine):
    engine = tiny_engine(num_blocks=20)
    structs = []
    snapshot, _ = engine.tap.follow(structs.append)
    engine.add("abcdefg", request_id="r", max_tokens=8)
    engine.step()
    late = next(b for b in structs if isinstance(b, ModelRunnerOutput))
    engine.abort("r")
    engine.add("xyz", request_id="r", max_tokens=8)
    engine.step()
    view = EngineView(snapshot)
    for struct in structs:
        view.apply(struct)
    assert view.requests["r"].block_ids
    view.apply(msgspec.structs.replace(late, attention_mass={"r": (0.75, 0.25)}))

    assert view.attention == {}


def test_a_frame_has_levels_of_the_largest_share(two_requests):
    view, _ = fold(*two_requests, {"r1": (0.75, 0.25), "r2": (0.5, 0.5)})
    first, second = (view.requests[i].block_ids for i in ("r1", "r2"))
    mass = PictureEncoder(view).full("live").header["mass"]

    assert mass["top"] == 0.625
    levels = dict(zip(mass["of"][::2], mass["of"][1::2], strict=True))
    assert levels == {first[0]: 255, first[1]: 51, second[1]: 102}
    assert list(levels) == sorted(levels)


def test_a_frame_without_a_measurement_says_nothing_of_it(two_requests):
    view, _ = fold(*two_requests, {})
    assert "mass" not in PictureEncoder(view).full("live").header


def test_a_large_pool_tells_the_most_attended_blocks_and_its_bins(tiny_engine):
    def view_of(num_blocks, count):
        engine = tiny_engine(num_blocks=num_blocks)
        structs = []
        snapshot, _ = engine.tap.follow(structs.append)
        engine.add("a")
        view = EngineView(snapshot)
        view.apply(structs[0])
        blocks = tuple(range(1, count + 1))
        new = SchedulerOutput(
            step=1, time=0.0, kv_events=tuple(BlockAllocated(i, "r1") for i in blocks)
        )
        view.apply(new)
        view._fold.roster.change("r1").block_ids = list(blocks)
        shares = tuple(float(i) for i in blocks)
        view.apply(
            ModelRunnerOutput(step=1, time=0.0, req_ids=("r1",), attention_mass={"r1": shares})
        )
        return view

    mass = PictureEncoder(view_of(9000, 8000)).full("live").header["mass"]
    assert len(mass["of"]) == 2 * 4096
    assert mass["of"][-2:] == [8000, 255]

    view = view_of(200_000, 1000)
    frame = PictureEncoder(view, in_bins=True).full("live")
    size = frame.header["bin"]
    places = frame.header["mass"]["of"][::2]
    assert places == sorted({i // size for i in range(1, 1001)})


def test_a_window_of_a_pool_in_bins_has_the_levels_of_its_blocks(tiny_engine):
    engine = tiny_engine(num_blocks=200_000)
    structs = []
    snapshot, _ = engine.tap.follow(structs.append)
    engine.add("abcdefghij", max_tokens=8)
    engine.step()
    view, _ = fold(snapshot, structs, {"r1": (0.5, 0.125, 0.375)})
    encoder = PictureEncoder(view, in_bins=True)
    encoder.window = (0, 256)
    header = encoder.full("live").header
    first, second, third = view.requests["r1"].block_ids

    assert header["mass"] == {"top": 0.5, "of": [first // header["bin"], 255]}
    levels = header["window"]["mass"]
    assert dict(zip(levels[::2], levels[1::2], strict=True)) == {
        first: 255, second: 64, third: 191,
    }  # fmt: skip
    assert "window" not in encoder.delta("live").header, "it is the same"


class Measuring:
    """A source that notes who measures."""

    def __init__(self, engine, error=None):
        self.tap = engine.tap
        self.num_open = 0
        self._error = error

    def measure_attention(self):
        if self._error is not None:
            raise self._error
        self.num_open += 1
        return self

    def close(self):
        self.num_open -= 1


def test_a_recording_measures_while_it_grows(tiny_engine):
    engine = tiny_engine()
    source = Measuring(engine)
    with record(source, attention=True) as recording:
        assert source.num_open == 1
        engine.add("abcd")
        engine.step()
        engine.tap(
            ModelRunnerOutput(step=1, time=0.0, req_ids=("r1",), attention_mass={"r1": (1.0,)})
        )
    recording.close()

    assert source.num_open == 0
    assert recording.at(step=1).attention == {recording.at().requests["r1"].block_ids[0]: 1.0}
    with record(source):
        assert source.num_open == 0


def test_a_recording_that_cannot_measure_leaves_nothing_behind(tiny_engine, tmp_path):
    engine = tiny_engine()
    with pytest.raises(TypeError, match=r"cannot measure attention; record an LLM"):
        record(engine, attention=True)
    with pytest.raises(ValueError, match="no attention"):
        record(Measuring(engine, ValueError("no attention")), tmp_path / "a", attention=True)
    assert not engine.tap.is_live
