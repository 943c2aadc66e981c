"""A live view with a comm that only keeps what is sent: no kernel, no browser."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import comm
import ipywidgets.widgets.widget as widget_module
import pytest
from comm.base_comm import BaseComm
from IPython.core.interactiveshell import InteractiveShell
from lmscope_widgets import base
from lmscope_widgets.dashboard import VIEWS, Dashboard
from lmscope_widgets.pump import Pump

from lmscope.llm import LLM
from lmscope.sampling_params import SamplingParams

WIDGET = "application/vnd.jupyter.widget-view+json"


class FakeComm(BaseComm):
    sent: list[tuple[str, Any, Any]] = []  # noqa: RUF012  # emptied by the fixture

    def publish_msg(
        self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any
    ) -> None:
        self.sent.append((msg_type, data, buffers))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, Any]]:
    """All comm messages of the test, oldest first: type, data, buffers."""
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


@pytest.fixture(scope="module")
def engine() -> Iterator[LLM]:
    with LLM(
        "scripted",
        execute="scripted",
        script=lambda request_id, position: ord("<b>"[position % 3]),
        block_size=4,
        num_kv_blocks=24,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    ) as engine:
        yield engine


@pytest.fixture
def view(sent: Any, engine: LLM, pump: Pump) -> Iterator[Dashboard]:
    view = Dashboard(engine, pump=pump)
    yield view
    view.close()


def from_page(view: Dashboard, content: Any) -> None:
    """Deliver a message as the front end does."""
    data = {"method": "custom", "content": content}
    view._handle_msg({"content": {"data": data}, "buffers": []})


def frames(sent: list[tuple[str, Any, Any]]) -> list[Any]:
    return [
        data["content"]
        for kind, data, _ in sent
        if kind == "comm_msg" and data["method"] == "custom"
    ]


def run(engine: LLM, prompt: str = "hello", **params: Any) -> None:
    engine.generate([prompt], SamplingParams(**({"max_tokens": 6} | params)), use_tqdm=False)


def test_frames_go_out_as_messages_with_buffers_and_not_as_traits(
    view: Dashboard, engine: LLM, pump: Pump, sent: Any
) -> None:
    from_page(view, {"k": "ready"})
    pump.tick()
    from_page(view, {"k": "ack", "seq": 0, "hidden": False})
    run(engine)
    pump.tick()

    kinds = [frame["k"] for frame in frames(sent)]
    assert kinds[:2] == ["full", "delta"]
    full = next(m for m in sent if m[0] == "comm_msg" and m[1]["method"] == "custom")
    assert [memoryview(b).nbytes for b in full[2]] == [24] * 4
    assert not any(data.get("method") == "update" for kind, data, _ in sent if data)


def test_nothing_is_sent_before_the_page_is_ready(
    view: Dashboard, engine: LLM, pump: Pump, sent: Any
) -> None:
    run(engine)
    pump.tick()

    assert frames(sent) == []


def test_messages_that_are_none_of_ours_are_ignored(view: Dashboard, pump: Pump, sent: Any) -> None:
    for content in ({"k": "what"}, {"k": "ack", "seq": -1}, [], None, "x", {"k": "command"}):
        from_page(view, content)
    pump.tick()

    assert frames(sent) == []
    assert view.is_open


def test_a_command_that_the_view_does_not_know_is_refused_in_words(
    view: Dashboard, pump: Pump, sent: Any
) -> None:
    from_page(view, {"k": "command", "id": 1, "op": "explode"})
    pump.tick()

    (answer,) = frames(sent)
    assert answer == {
        "k": "reply",
        "id": 1,
        "ok": False,
        "error": "this view has no command 'explode'",
    }


def test_messages_are_taken_on_whatever_thread_they_come(
    view: Dashboard, pump: Pump, sent: Any
) -> None:
    # A front end that names no subshell has them handled on the main thread, others elsewhere.
    for number in range(6):
        command = {"k": "command", "id": number, "op": "rate", "arg": 5}
        if number % 2:
            from_page(view, command)
        else:
            subshell = threading.Thread(target=from_page, args=(view, command))
            subshell.start()
            subshell.join()
    assert frames(sent) == []
    pump.tick()

    answers = [(answer["id"], answer["ok"]) for answer in frames(sent)]
    assert answers == [(number, True) for number in range(6)]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e308, 2**53])
def test_no_number_of_a_page_ends_its_view(
    view: Dashboard, pump: Pump, sent: Any, number: float
) -> None:
    for operation in ("rate", "seek", "speed", "step", "break"):
        from_page(view, {"k": "command", "id": 1, "op": operation, "arg": number})
    pump.tick()

    assert [answer["ok"] for answer in frames(sent)] == [False] * 5
    assert view.is_open


@pytest.mark.parametrize("arg", [0, -1, 21, 1e9, True, None, "5"])
def test_a_rate_that_no_view_can_have_is_refused(
    view: Dashboard, pump: Pump, sent: Any, arg: Any
) -> None:
    from_page(view, {"k": "command", "id": 1, "op": "rate", "arg": arg})
    pump.tick()

    assert [answer["ok"] for answer in frames(sent)] == [False]


def test_the_page_may_set_the_rate(view: Dashboard, pump: Pump, sent: Any) -> None:
    from_page(view, {"k": "command", "id": 1, "op": "rate", "arg": 2})
    pump.tick()

    assert [answer["ok"] for answer in frames(sent)] == [True]


def test_a_page_of_bins_may_ask_for_single_blocks(
    view: Dashboard, pump: Pump, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmscope.scope.picture._MAX_SINGLE", 10)
    from_page(view, {"k": "ready"})
    pump.tick()
    assert "window" not in frames(sent)[-1]

    from_page(view, {"k": "command", "id": 1, "op": "window", "arg": "0:8"})
    pump.tick()
    told = [frame for frame in frames(sent) if frame["k"] in ("full", "delta")][-1]
    assert (told["window"]["first"], told["window"]["count"]) == (0, 8)
    assert told["window"]["blocks"][0] == [0, 255, 3, 0, 0]

    for wrong in ("8", "0:0", "0:1025", "24:1", "-1:4", True, "0:8:8"):
        from_page(view, {"k": "command", "id": 2, "op": "window", "arg": wrong})
        pump.tick()
        reply = [frame for frame in frames(sent) if frame["k"] == "reply"][-1]
        assert not reply["ok"], wrong
        assert "window is" in reply["error"]


def test_buttons_are_answered_and_set_the_gate(
    view: Dashboard, engine: LLM, pump: Pump, sent: Any
) -> None:
    commands = [
        ("pause", None), ("break", "finish"), ("unbreak", "finish"), ("resume", None), ("step", 3),
    ]  # fmt: skip
    for number, (op, arg) in enumerate(commands):
        from_page(view, {"k": "command", "id": number, "op": op, "arg": arg})
        pump.tick()
        assert engine.gate.is_closed == (number < 3)

    assert view.commands == ["pause", "resume", "step", "break", "unbreak"]
    replies = [answer for answer in frames(sent) if answer["k"] == "reply"]
    assert [(answer["id"], answer["ok"]) for answer in replies] == [
        (0, True), (1, True), (2, True), (3, True), (4, False),
    ]  # fmt: skip


def test_the_output_carries_widget_image_table_and_text(view: Dashboard, engine: LLM) -> None:
    run(engine, "a <script>alert(1)</script>")
    bundle, _ = view._repr_mimebundle_()

    assert set(bundle) == {WIDGET, "text/html", "text/plain"}
    assert '<img alt="' in bundle["text/html"]
    assert "<script>" not in bundle["text/html"]
    assert "&lt;b&gt;" in bundle["text/html"]
    assert bundle["text/plain"].startswith("lmscope  step")
    assert sum(len(str(value).encode()) for value in bundle.values()) < 50_000


def test_the_output_shows_only_the_views_that_were_asked_for(
    engine: LLM, pump: Pump, sent: Any
) -> None:
    view = Dashboard(engine, views="tokens", pump=pump)
    run(engine, "whose text is this")
    bundle, _ = view._repr_mimebundle_()
    view.close()

    assert "whose text is this" in bundle["text/html"]
    assert "how it ended" not in bundle["text/html"]
    assert "null" not in bundle["text/plain"]
    assert bundle["text/plain"].startswith("lmscope  step")


def test_the_code_of_the_page_is_read_from_files() -> None:
    assert "lms" in str(Dashboard._esm)
    assert ".lms" in str(Dashboard._css)
    # No CDN, no import: a widget's module is loaded from a blob and finds nothing else.
    assert "http://" not in str(Dashboard._esm).replace("http://www.w3.org", "")
    assert "https://" not in str(Dashboard._esm)


def test_repr_is_one_line_that_says_how_it_stands(view: Dashboard, engine: LLM) -> None:
    run(engine)
    assert view.is_idle
    text = repr(view)

    assert text.startswith("<Dashboard of scripted: finished, step ")
    assert text.endswith("0 running, 0 waiting>")
    view.close()
    assert repr(view) == "<Dashboard of scripted: closed>"


def test_closing_twice_is_fine_and_leaves_nothing(engine: LLM, pump: Pump, sent: Any) -> None:
    view = Dashboard(engine, pump=pump)
    model_id = view.model_id
    view.close()
    view.close()

    assert not view.is_open
    assert model_id not in widget_module._instances
    assert pump.num_feeds == 0
    # the view and its layout
    assert [kind for kind, _, _ in sent] == ["comm_open"] * 2 + ["comm_close"] * 2


def test_fifty_rounds_leave_models_and_listeners_as_they_were(
    engine: LLM, pump: Pump, sent: Any
) -> None:
    models = len(widget_module._instances)
    listeners = len(engine.tap._subscriptions)
    views = []
    for _ in range(50):
        view = Dashboard(engine, pump=pump)
        from_page(view, {"k": "ready"})
        pump.tick()
        view.close()
        views.append(weakref.ref(view))
    del view
    gc.collect()

    assert len(widget_module._instances) == models
    assert len(engine.tap._subscriptions) == listeners
    assert [view for view in views if view() is not None] == []


def test_a_view_that_was_dropped_says_why(
    view: Dashboard, pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(content: Any, buffers: Any = None) -> None:
        raise OSError("no socket")

    monkeypatch.setattr(view, "send", send)
    from_page(view, {"k": "ready"})
    pump.tick()

    assert not view.is_open
    assert repr(view) == "<Dashboard of scripted: failed, OSError('no socket')>"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rate": 5}, TypeError, "no option 'rate'"),
        ({"rate_hz": 0}, ValueError, "above 0 and at most 20"),
        ({"rate_hz": 21}, ValueError, "rate_hz is 21"),
        ({"views": ["block"]}, ValueError, "did you mean 'blocks'"),
        ({"views": "requets"}, ValueError, "did you mean 'requests'"),
    ],
)
def test_wrong_options_are_named(
    engine: LLM, pump: Pump, sent: Any, options: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Dashboard(engine, pump=pump, **options)

    assert pump.num_feeds == 0


def test_what_has_no_tap_cannot_be_watched(sent: Any) -> None:
    with pytest.raises(TypeError, match="a str has no tap"):
        Dashboard("llm")  # type: ignore[arg-type]  # what a user may try


def test_views_are_all_of_them_unless_named(engine: LLM, pump: Pump, sent: Any) -> None:
    everything = Dashboard(engine, pump=pump)
    one = Dashboard(engine, views=["blocks"], pump=pump)

    assert everything.views == list(VIEWS)
    assert one.views == ["blocks"]
    assert one.still_views() == ("blocks",)
    assert everything.still_views() is None
    everything.close()
    one.close()


class Shown:
    """Stands in for IPython's display and its handles; keeps the bundles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bundles: list[dict[str, Any]] = []
        self.count = 1
        monkeypatch.setattr(base, "display", self.display)
        monkeypatch.setattr(base, "_execution_count", lambda: self.count)

    def display(self, thing: Any, display_id: bool) -> Shown:
        assert display_id is True
        self.update(thing)
        return self

    def update(self, thing: Any, raw: bool = False) -> None:
        if raw:
            self.bundles.append(thing)
        else:
            bundle = thing._repr_mimebundle_()
            self.bundles.append(bundle[0] if isinstance(bundle, tuple) else bundle)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch)


def test_a_view_shows_itself_once_and_is_one_line_as_the_value_of_its_cell(
    view: Dashboard, shown: Shown
) -> None:
    view.show()
    assert set(shown.bundles[0]) == {WIDGET, "text/html", "text/plain"}
    assert view._repr_mimebundle_() == {"text/plain": repr(view)}

    shown.count += 1
    bundle, _ = view._repr_mimebundle_()
    assert WIDGET in bundle


def test_freeze_writes_the_final_picture_once_per_run(
    view: Dashboard, engine: LLM, shown: Shown
) -> None:
    view.show()
    view.freeze()
    assert len(shown.bundles) == 1

    run(engine, "a prompt that nobody had before")
    view.freeze()
    view.freeze()
    assert len(shown.bundles) == 2
    assert "a prompt that nobody had before" in shown.bundles[1]["text/html"]
    assert WIDGET in shown.bundles[1]


def test_a_closed_view_leaves_the_last_picture_and_no_widget(
    view: Dashboard, engine: LLM, shown: Shown
) -> None:
    view.show()
    run(engine)
    view.close()

    assert set(shown.bundles[-1]) == {"text/html", "text/plain"}


def test_outside_ipython_there_is_no_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "get_ipython", lambda: None)
    assert base._execution_count() is None

    shell = InteractiveShell.instance()
    monkeypatch.setattr(base, "get_ipython", lambda: shell)
    assert base._execution_count() == shell.execution_count
