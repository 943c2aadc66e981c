"""Blocks coloured by attention: who measures, for how long, and what a view says without it."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import comm
import msgspec
import numpy as np
import pytest
from comm.base_comm import BaseComm
from lmscope_widgets.dashboard import Dashboard, check_colour
from lmscope_widgets.palette import READABLE, _contrast, light
from lmscope_widgets.pump import Pump
from lmscope_widgets.still import MOST_BYTES, still
from lmscope_widgets.still_attention import grounds
from lmscope_widgets.still_picture import draw_picture

import lmscope
from lmscope import SamplingParams, record
from lmscope.boundary import ModelRunnerOutput
from lmscope.llm import LLM
from lmscope.scope.recording import Recording
from lmscope.tap import Tap


class FakeComm(BaseComm):
    sent: list[Any] = []  # noqa: RUF012  # emptied by the fixture

    def publish_msg(self, msg_type: str, data: Any = None, *args: Any, **more: Any) -> None:
        if msg_type == "comm_msg" and data["method"] == "custom":
            self.sent.append(data["content"])


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages to the pages, oldest first."""
    FakeComm.sent = []
    monkeypatch.setattr(comm, "create_comm", lambda **options: FakeComm(**options))
    return FakeComm.sent


@pytest.fixture
def pump() -> Pump:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # every look at the clock is a second later, so nothing is too early
        return now[0]

    return Pump(clock, thread=False)


@pytest.fixture
def engine() -> Iterator[LLM]:
    with LLM(
        "scripted",
        execute="scripted",
        script=lambda request_id, position: ord("abc"[position % 3]),
        block_size=4,
        num_kv_blocks=24,
    ) as engine:
        yield engine


class Measuring:
    """A source with attention: the stream of an engine, whose model outputs tell shares.

    opened   measurements that are open now
    """

    def __init__(self, engine: LLM) -> None:
        self.tap = engine.tap
        self.opened = 0
        self.closed = threading.Event()

    def measure_attention(self) -> Measuring.Measure:
        return Measuring.Measure(self)

    class Measure:
        def __init__(self, source: Measuring) -> None:
            self._source = source
            source.opened += 1

        def close(self) -> None:
            self._source.opened -= 1
            self._source.closed.set()


def run(engine: LLM, prompt: str = "a prompt of some blocks") -> None:
    engine.generate([prompt], SamplingParams(max_tokens=6), use_tqdm=False)


def open_page(view: Dashboard) -> None:
    """A page opens the view, and asks for everything."""
    data = {"method": "custom", "content": {"k": "ready"}}
    view._handle_msg({"content": {"data": data}, "buffers": []})


def look(view: Dashboard, pump: Pump, sent: list[Any]) -> dict[str, Any]:
    """The newest frame that the page of a view gets when it asks for everything."""
    open_page(view)
    pump.tick()
    return [message for message in sent if message["k"] == "full"][-1]


@pytest.fixture(scope="module")
def recordings() -> tuple[Recording, Recording]:
    """The same run, measured and not: its first block gets half of all attention."""
    with (
        LLM(
            "scripted",
            execute="scripted",
            script=lambda request_id, position: ord("abc"[position % 3]),
            block_size=4,
            num_kv_blocks=24,
        ) as engine,
        record(engine) as plain,
    ):
        run(engine)
    return _measured(plain), plain


def _measured(recording: Recording) -> Recording:
    """A recording whose model outputs have shares."""

    class Source:
        tap = Tap(recording.info, lambda: recording.snapshot)

    source = Source()
    with record(source) as made:
        for boundary in recording.boundaries:
            if isinstance(boundary, ModelRunnerOutput) and boundary.req_ids:
                view = recording.at(step=boundary.step)
                mass = {}
                for request_id in boundary.req_ids:
                    count = len(view.requests[request_id].block_ids) or 2
                    mass[request_id] = (0.5, *([0.5 / (count - 1)] * (count - 1)))
                boundary = msgspec.structs.replace(boundary, attention_mass=mass)
            source.tap(boundary)
    return made


def test_a_view_measures_while_it_is_open_and_each_one_for_itself(engine: LLM, pump: Pump) -> None:
    source = Measuring(engine)
    first = Dashboard(source, colour="attention", pump=pump)
    second = Dashboard(source, colour="attention", pump=pump)
    plain = Dashboard(source, pump=pump)
    assert source.opened == 2
    first.close()
    first.close()
    plain.close()
    assert source.opened == 1
    second.close()
    assert source.opened == 0


def test_a_view_that_nobody_holds_measures_no_more(engine: LLM, pump: Pump) -> None:
    source = Measuring(engine)
    view = Dashboard(source, colour="attention", pump=pump)
    view.close(keeps_picture=False)
    view = Dashboard(source, colour="attention", pump=pump)
    source.closed.clear()
    # Without its comm nothing of the front end holds it.
    widget, view = view, None
    widget.comm.close()
    type(widget).__del__(widget)
    del widget
    gc.collect()

    assert source.closed.wait(200)
    assert source.opened == 0


def test_a_view_that_fails_measures_no_more(
    engine: LLM, pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Measuring(engine)
    view = Dashboard(source, colour="attention", pump=pump)

    def send(content: Any, buffers: Any = None) -> None:
        raise OSError("no socket")

    monkeypatch.setattr(view, "send", send)
    open_page(view)
    pump.tick()

    assert not view.is_open
    assert source.closed.wait(200)
    assert source.opened == 0


def test_a_script_has_no_attention_and_leaves_no_view_behind(engine: LLM, pump: Pump) -> None:
    listeners = len(engine.tap._subscriptions)
    with pytest.raises(ValueError, match="no attention; use execute='model'"):
        Dashboard(engine, colour="attention", pump=pump)
    assert len(engine.tap._subscriptions) == listeners


def test_a_source_that_cannot_measure_says_what_to_do(engine: LLM, pump: Pump) -> None:
    class Other:
        tap = engine.tap

    listeners = len(engine.tap._subscriptions)
    with pytest.raises(TypeError, match='watch an LLM, or leave colour="attention" out'):
        Dashboard(Other(), colour="attention", pump=pump)
    assert len(engine.tap._subscriptions) == listeners


@pytest.mark.parametrize("show", [Dashboard, lmscope.watch, lmscope.debug])
def test_an_unknown_colour_names_the_nearest(engine: LLM, show: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"no colour 'atention'; did you mean 'attention'\?"):
        show(engine, colour="atention")
    with pytest.raises(ValueError, match="did you mean 'owner'"):
        check_colour("own")
    assert not engine.gate.is_closed


def test_the_page_gets_its_colour_as_a_trait(engine: LLM, pump: Pump) -> None:
    for colour in ("owner", "attention"):
        view = Dashboard(Measuring(engine), colour=colour, pump=pump)
        assert view.get_state()["colour"] == colour
        view.close()


def test_a_replay_shows_what_was_recorded_and_says_where_nothing_was(
    recordings: tuple[Recording, Recording], pump: Pump, sent: list[Any]
) -> None:
    measured, plain = recordings
    for recording in recordings:
        player = lmscope.replay(recording)
        view = Dashboard(player, colour="attention", pump=pump)
        player.seek(recording.steps[-1])
        frame = look(view, pump, sent)
        if recording is measured:
            assert frame["mass"]["top"] == 0.5
            assert frame["note"] == ""
        else:
            assert "mass" not in frame
            assert "nobody measured attention in step" in frame["note"]
            assert "record(llm, attention=True)" in frame["note"]
        view.close()
        player.close()
    by_owner = Dashboard(lmscope.replay(plain), pump=pump)
    assert look(by_owner, pump, sent)["note"] == ""
    by_owner.close()


def test_a_view_whose_colour_is_changed_later_says_that_nobody_measures(
    engine: LLM, pump: Pump, sent: list[Any]
) -> None:
    run(engine)
    view = Dashboard(engine, pump=pump)
    view.colour = "attention"
    assert 'lmscope.watch(llm, colour="attention")' in look(view, pump, sent)["note"]
    view.close()


def test_text_reads_on_every_ground() -> None:
    for look in light().attention:
        assert _contrast(look.ground, look.text) >= READABLE


MASS = {"top": 0.4, "of": [1, 255, 2, 64, 3, 1]}


def test_a_still_picture_has_the_grounds_of_the_page(make_frame: Any) -> None:
    frame, columns = make_frame(mass=MASS)
    made = grounds(frame, 50)
    assert made is not None
    # The square root: a quarter is in the middle of the sixteen.
    assert made[:5].tolist() == [0, 16, 9, 2, 0]
    assert grounds(make_frame()[0], 50) is None

    by_owner = draw_picture(frame, columns, [])
    assert draw_picture(frame, columns, [], colour="attention") != by_owner
    assert draw_picture(make_frame()[0], columns, [], colour="attention") == by_owner


@pytest.mark.parametrize("num_blocks", [50, 2_000, 30_000])
def test_by_attention_blocks_have_its_grounds_and_no_owners_tint(
    make_frame: Any, num_blocks: int
) -> None:
    from lmscope_widgets.raster import Canvas
    from lmscope_widgets.still_map import BlockMap

    frame, columns = make_frame(num_blocks=num_blocks, held=4, mass=MASS)
    slots = {row["id"]: row["slot"] for row in frame["rows"]}
    canvas = Canvas(776, 400, light().background)
    drawn = BlockMap(
        columns, frame["cells"], 4, [], slots, labels=0, grounds=grounds(frame, num_blocks)
    )
    drawn.draw(canvas, 0, 0, 776, 400)
    pixels = {tuple(c) for c in np.unique(canvas.pixels.reshape(-1, 3), axis=0).tolist()}

    assert light().attention[15].ground in pixels
    assert not pixels & {light().owner(slot).tint for slot in range(4)}


def test_the_table_names_the_most_attended_blocks_with_their_owners(make_frame: Any) -> None:
    most = [(1, 0.4, ("r0", "r1")), (7, 0.0004, ("<b>",)), (9, 0.0, ())]
    frame, columns = make_frame(mass=MASS, most_attended=most)
    text = still(frame, columns, [], "", colour="attention")["text/html"]

    _, *rows = text.split("most attended block", 1)[1].split("</table>")[0].split("<tr>")
    cells = [[cell.split(">")[-1] for cell in row.split("</td>")[:3]] for row in rows]
    assert cells == [
        ["1", "40.0 %", "r0, r1"],
        ["7", "below 0.1 %", "&lt;b&gt;"],
        ["9", "0.0 %", "–"],
    ]
    assert "most attended" not in still(frame, columns, [], "")["text/html"]
    plain, columns = make_frame()
    assert "not measured" in still(plain, columns, [], "", colour="attention")["text/html"]


def test_a_still_picture_by_attention_stays_small(make_frame: Any) -> None:
    noise = np.random.default_rng(0).integers(1, 256, 4096)
    of = [int(each) for pair in enumerate(noise, start=1) for each in pair]
    for has_cells in (False, True):
        frame, columns = make_frame(
            num_blocks=5_000, num_requests=24, held=200, has_cells=has_cells,
            mass={"top": 0.4, "of": of},
        )  # fmt: skip
        bundle = still(frame, columns, [], "", colour="attention")
        assert sum(len(part.encode()) for part in bundle.values()) <= MOST_BYTES
        assert "<img" in bundle["text/html"]


def test_the_output_of_a_view_is_coloured_as_the_view(
    recordings: tuple[Recording, Recording], pump: Pump
) -> None:
    player = lmscope.replay(recordings[0])
    view = Dashboard(player, colour="attention", views="blocks", pump=pump)
    player.seek(recordings[0].steps[-1])
    bundle, _ = view._repr_mimebundle_()
    assert "most attended block" in bundle["text/html"]
    assert "50.0 %" in bundle["text/html"]
    assert "of the step's attention" in bundle["text/plain"]
    view.close()
    player.close()


@pytest.mark.browser
def test_a_page_colours_by_attention_with_a_key(
    recordings: tuple[Recording, Recording], tmp_path: Path
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("no Chromium on this machine")
    files = [tmp_path / "measured.html", tmp_path / "plain.html"]
    for recording, file in zip(recordings, files, strict=True):
        recording.to_html(file)
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))

        page.goto(files[0].as_uri())
        page.wait_for_function("() => window.__lmscope_page")
        switch = page.locator(".lms-colour")
        assert switch.is_visible()
        by_owner = _pixels(page)
        page.keyboard.press("a")
        page.wait_for_timeout(200)
        assert switch.locator("[aria-current=true]").inner_text() == "attention"
        by_attention = _pixels(page)
        assert by_attention != by_owner
        assert "50.0 %" in page.locator(".lms-legend").inner_text()
        page.locator("canvas.lms-map").focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        page.wait_for_timeout(200)
        assert "50.0 % of the step's attention" in page.locator(".lms-p-map").inner_text()
        page.keyboard.press("Escape")
        switch.click()
        page.wait_for_timeout(200)
        assert switch.locator("[aria-current=true]").inner_text() == "owner"

        page.goto(f"{files[1].as_uri()}#colour=owner")
        page.wait_for_function("() => window.__lmscope_page")
        assert not page.locator(".lms-colour").is_visible()
        assert errors == []
        chromium.close()


def _pixels(page: Any) -> str:
    return str(page.evaluate("() => document.querySelector('canvas.lms-map').toDataURL()"))
