"""What a live dashboard costs and how fast it answers, in JupyterLab in a headless browser.

    .venv/bin/python kernels/benchmarks/widgets.py --only clicks pixels --out widgets.json

clicks       from a click on Pause to the command in the kernel and to the standing engine: with
             the cell returned, while a cell waits, and so without subshells
pixels       from the end of a step to the screen, 100,000 blocks
frames       messages a second and their bytes, for the dashboard and for each view alone
million      the same for 1,000,000 blocks and 60 requests, with the time of each drawing
throughput   tokens a second with the dashboard open and with none, in pairs in turn

The server is on the loopback and gone at the end. "clicks", "frames" and "throughput" generate with
the demo model on one torch thread; in the others a script stands in its place, 30 ms a step. The
exit status is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from start import quartiles
from widgets_lab import Lab, find_browser, open_browser, start_lab

__all__ = ["Goal", "drawn_after", "main", "percentile", "table", "verdict"]

RATE_HZ = 10
STEP_S = 0.03
_KIND = re.compile(rb'"msg_type": ?"(\w+)"')
VIEWS = ("timeline", "blocks", "tree", "tokens", "requests", "debugger")

# Counts what each animation frame of a view takes, and when it was done. `drawn` of a view grows
# inside the frame that draws it; that the pixels are there is seen in the frame after it.
_INIT = """
window.measured = {drawings: [], shown: [], clicks: []};
const drawnBy = () => (window.__lmscope_views ?? []).map((view) => view.lmscopeTest.drawn)
  .reduce((sum, count) => sum + count, 0);
const request = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (callback) => request((now) => {
  const before = drawnBy();
  const began = performance.now();
  callback(now);
  const took = performance.now() - began;
  if (drawnBy() === before) return;
  const {seq} = window.__lmscope_views.at(-1).lmscopeTest;
  window.measured.drawings.push(took);
  request(() => window.measured.shown.push([seq, Date.now()]));
});
"""
_CLICK = """(selector) => {
  const button = document.querySelector(selector);
  window.measured.clicks.push(Date.now());
  button.click();
}"""
_PAUSE = ".lms .lms-d-pause"


class Goal(NamedTuple):
    """A number that was measured, and what it must keep to."""

    what: str
    value: float
    limit: float
    is_most: bool = True

    @property
    def is_met(self) -> bool:
        return self.value <= self.limit if self.is_most else self.value >= self.limit


Result = tuple[dict[str, list[float]], list[Goal]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    browser = find_browser()
    if browser is None:
        print("there is no Chromium on this machine; install one", file=sys.stderr)
        return 2
    load_before = os.getloadavg()
    measured: dict[str, list[float]] = {}
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with (
            start_lab(root) as (url, notebooks),
            open_browser(browser, root / "profile") as context,
        ):
            lab = Lab(url, notebooks, context)
            for name in options.only:
                lab.init_script = _INIT
                numbers, kept_to = MEASURES[name](lab, options)
                measured |= numbers
                goals += kept_to
                lab.close_notebooks()
    lines = [*table(measured), "", *verdict(goals)]
    print("\n".join(lines))
    if options.out:
        names = ("lmscope", "torch", "jupyterlab", "ipykernel", "ipywidgets", "anywidget")
        report = {
            "date": datetime.date.today().isoformat(),
            "cores": os.cpu_count(),
            "machine": platform.platform(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in names} | {"browser": _say(browser)},
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "measured": measured,
            "goals": [goal._asdict() for goal in goals],
        }
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    return int(not all(goal.is_met for goal in goals))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--clicks", type=int, default=60, help="in each situation")
    parser.add_argument("--seconds", type=float, default=20, help="of pixels and million")
    parser.add_argument("--pairs", type=int, default=20, help="of throughput")
    parser.add_argument("--requests", type=int, default=8, help="of throughput, at once")
    parser.add_argument("--output-tokens", type=int, default=48, help="of throughput, each")
    parser.add_argument("--out", help="write every measurement to this JSON file")
    options = parser.parse_args(arguments)
    if options.clicks < 2 or options.pairs < 2:
        parser.error("--clicks and --pairs must be at least 2")
    return options


def _say(browser: str) -> str:
    return subprocess.run([browser, "--version"], capture_output=True, text=True).stdout.strip()


# --- a notebook ------------------------------------------------------------------------------


class Session:
    """A notebook with one cell for each thing to do, run when it is named."""

    def __init__(self, lab: Lab, name: str, setup: str, **cells: str) -> None:
        here = str(Path(__file__).parent)
        first = (
            f"import sys\nsys.path.insert(0, {here!r})\n"
            "from widgets_kernel import *\nfrom lmscope import watch\n" + setup
        )
        self._places = {what: place for place, what in enumerate(("", *cells))}
        self.notebook = lab.open(f"{name}.ipynb", [first, *cells.values()])
        self.notebook.run(0)

    @property
    def page(self) -> Any:
        return self.notebook.page

    def run(self, what: str) -> Any:
        """Run a cell; what it printed as JSON, if anything."""
        text = self.notebook.run(self._places[what])
        return json.loads(text) if text else None

    def start(self, what: str) -> None:
        self.notebook.start(self._places[what])

    def wait(self, what: str) -> None:
        self.notebook.wait(self._places[what])

    def wait_for_view(self) -> None:
        """Until the view has been drawn."""
        self.page.wait_for_function(
            "() => window.__lmscope_views?.at(-1)?.lmscopeTest.drawn > 0", polling=100
        )
        self.notebook.look_at(".lms")

    def browser(self) -> dict[str, Any]:
        """What the page has measured so far; it begins anew."""
        measured: dict[str, Any] = self.page.evaluate(
            "() => { const was = window.measured;"
            "  window.measured = {drawings: [], shown: [], clicks: []}; return was; }"
        )
        return measured


# --- clicks ----------------------------------------------------------------------------------


def measure_clicks(lab: Lab, options: argparse.Namespace) -> Result:
    session = Session(
        lab,
        "clicks",
        "llm = demo_engine(num_kv_blocks=512, max_num_seqs=8)",
        watch="stamps = Stamps(llm)",
        talk="talk = Talk(llm, 4, 300)",
        clear="stamps.clear()",
        # As a cell that waits for its output does: in short pieces.
        busy="import time\nend = time.monotonic() + 120\n"
        f"while len(stamps.stood) < {options.clicks} and time.monotonic() < end:\n"
        "    time.sleep(0.05)",
        short="time.sleep(3)",
        read="print_json(stamps.as_json())",
        end="llm.gate.resume()\ntalk.close()\nstamps.close()\nllm.close()",
    )
    session.run("watch")
    session.wait_for_view()
    session.run("talk")
    numbers: dict[str, list[float]] = {}
    for situation in ("cell returned", "cell waits"):
        session.run("clear")
        session.browser()
        if situation == "cell waits":
            session.start("busy")
        _click(session.page, options.clicks)
        if situation == "cell waits":
            session.wait("busy")
        numbers |= _click_times(situation, session.browser()["clicks"], session.run("read"))
    # A front end that names no subshell: a click is handled when the cell is over.
    session.page.evaluate(
        "() => { window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
        ".commsOverSubshells = 'disabled'; }"
    )
    for situation in ("cell returned, no subshells", "cell sleeps 3 s, no subshells"):
        session.run("clear")
        session.browser()
        if situation.startswith("cell sleeps"):
            session.start("short")
            _click(session.page, 1)
            session.wait("short")
        else:
            _click(session.page, options.clicks)
        numbers |= _click_times(situation, session.browser()["clicks"], session.run("read"))
    session.run("end")
    goals = []
    # The engine stands once what it was at has come to its end, at most one run of the model.
    for what in ("click to gate told", "click to standing engine"):
        p95 = percentile(numbers[f"ms, {what}, cell returned"], 95)
        goals.append(Goal(f"{what}, cell returned, p95 in ms", p95, 100))
    return numbers, goals


def _click(page: Any, count: int) -> None:
    """Pause and resume, at no fixed rhythm."""
    chance = random.Random(0)
    for _ in range(count):
        page.wait_for_timeout(150 + 250 * chance.random())
        for phase in ("paused", "live"):
            page.evaluate(_CLICK, _PAUSE)
            page.wait_for_selector(f".lms .lms-pill[data-phase='{phase}']")
            # The page shows a click before Python does: it is at rest when a frame has said so.
            page.wait_for_timeout(200)


def _click_times(
    situation: str, clicks: list[float], stamps: dict[str, Any]
) -> dict[str, list[float]]:
    """Of the clicks that pause, every other one."""
    pauses = clicks[::2]
    commands = stamps["received"][::2]
    if not len(pauses) == len(commands) == len(stamps["asked"]) == len(stamps["stood"]):
        counts = {name: len(stamps[name]) for name in ("received", "asked", "stood")}
        raise RuntimeError(f"{len(clicks)} clicks, but the kernel has {counts}")
    return {
        f"ms, click to command in the kernel, {situation}": _apart(pauses, commands),
        f"ms, click to gate told, {situation}": _apart(pauses, stamps["asked"]),
        f"ms, click to standing engine, {situation}": _apart(pauses, stamps["stood"]),
    }


def _apart(clicks_ms: Sequence[float], stamps_s: Sequence[float]) -> list[float]:
    return [1000 * at - click for click, at in zip(clicks_ms, stamps_s, strict=True)]


# --- pixels ----------------------------------------------------------------------------------


def measure_pixels(lab: Lab, options: argparse.Namespace) -> Result:
    stamps, page = _run_scripted(lab, "pixels", 100_000, 16, options.seconds)
    newest, every = drawn_after(stamps["steps"], stamps["sent"], page["shown"])
    drawn_at = dict(page["shown"])
    numbers = {
        "ms, frame handed over to screen, 100,000 blocks": [
            drawn_at[one[0]] - 1000 * one[6] for one in stamps["sent"] if one[0] in drawn_at
        ],
        "ms, newest step of a frame to screen, 100,000 blocks": newest,
        "ms, any step to screen, 100,000 blocks": every,
        "ms, drawing, 100,000 blocks": page["drawings"],
    }
    # A step may end just after a frame has left; the next one leaves 100 ms later.
    goals = [
        Goal("newest step of a frame to screen, p95 in ms", percentile(newest, 95), 150),
        Goal("any step to screen, p95 in ms", percentile(every, 95), 150),
    ]
    return numbers, goals


def drawn_after(
    steps: Sequence[tuple[int, float]],
    sent: Sequence[Sequence[Any]],
    shown: Sequence[tuple[int, float]],
) -> tuple[list[float], list[float]]:
    """Milliseconds from the end of steps to the screen.

    steps   number and second of each step's end
    sent    of each frame first its seq, epoch and step
    shown   seq of a frame that was drawn, and the millisecond when that was on the screen

    Returns them for the last step that each drawn frame shows, and for every step: one whose frame
    was never drawn counts up to the next frame that was. A frame made in the middle of a step shows
    the one before as ended.
    """
    drawn_at = dict(shown)
    ends = dict(steps)
    # Of the drawn frames: the last step that had ended when it was made, and when it was seen.
    frames = []
    for seq, _, step, _, _, _, made_at, *_ in sent:
        if seq in drawn_at:
            ended = [number for number in (step, step - 1) if ends.get(number, 2**60) <= made_at]
            if ended:
                frames.append((ended[0], drawn_at[seq]))
    newest, every = [], []
    known = 0
    for ended_step, at_ms in frames:
        new = [number for number in range(known + 1, ended_step + 1) if number in ends]
        if known:
            every += [at_ms - 1000 * ends[number] for number in new]
            newest += [at_ms - 1000 * ends[number] for number in new[-1:]]
        known = max(known, ended_step)
    return newest, every


def _run_scripted(
    lab: Lab, name: str, num_blocks: int, num_requests: int, seconds: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    session = Session(
        lab,
        name,
        f"llm = scripted_engine({num_blocks}, {num_requests}, {STEP_S})",
        watch=f"stamps = Stamps(llm, rate_hz={RATE_HZ})",
        talk=f"talk = Talk(llm, {num_requests}, 200)",
        clear="stamps.clear()",
        resync="stamps.view._receive(None, {'k': 'resync'}, [])",
        read="print_json(stamps.as_json())",
        end="talk.close()\nstamps.close()\nllm.close()",
    )
    session.run("watch")
    session.wait_for_view()
    session.run("talk")
    session.page.wait_for_timeout(2000)
    session.browser()
    session.run("clear")
    # Full frames as a page asks for them after a gap, at the worst times.
    for _ in range(4):
        session.page.wait_for_timeout(seconds * 250)
        session.run("resync")
    session.page.wait_for_timeout(1000)
    measured = session.run("read"), session.browser()
    session.run("end")
    return measured


# --- frames ----------------------------------------------------------------------------------


def measure_frames(lab: Lab, options: argparse.Namespace) -> Result:
    cells = {name: f"stamps = Stamps(llm, views={name!r}, rate_hz={RATE_HZ})" for name in VIEWS}
    with counted_sockets(lab) as counts:
        session = Session(
            lab,
            "frames",
            "llm = demo_engine(num_kv_blocks=512, max_num_seqs=8)\ntalk = Talk(llm, 6, 64)",
            dashboard=f"stamps = Stamps(llm, rate_hz={RATE_HZ})",
            **cells,
            read="print_json(stamps.as_json())",
            close="stamps.close()",
            end="talk.close()\nllm.close()",
        )
        numbers: dict[str, list[float]] = {}
        rates = []
        for name in ("dashboard", *VIEWS):
            session.run(name)
            session.wait_for_view()
            session.page.wait_for_timeout(1000)
            before, began = dict(counts), time.monotonic()
            session.page.wait_for_timeout(6000)
            took = time.monotonic() - began
            rates.append((counts["comm"] - before["comm"]) / took)
            numbers[f"messages a second, {name}"] = [rates[-1]]
            numbers[f"messages and their busy and idle a second, {name}"] = [
                (counts["all"] - before["all"]) / took
            ]
            numbers[f"bytes of a frame, {name}"] = [
                header + parts for *_, header, parts, _, _, _ in session.run("read")["sent"]
            ]
            session.run("close")
        session.run("end")
    return numbers, [Goal("messages a second of a view, most", max(rates), 30)]


@contextmanager
def counted_sockets(lab: Lab) -> Iterator[dict[str, int]]:
    """Counts what crosses the websockets of all pages opened meanwhile, in both directions."""
    counts = {"all": 0, "comm": 0}

    def count(payload: str | bytes) -> None:
        data = payload if isinstance(payload, bytes) else payload.encode()
        counts["all"] += 1
        kind = _KIND.search(data)  # the first is the message's own, the next that of its cause
        counts["comm"] += kind is not None and kind[1] == b"comm_msg"

    def listen(socket: Any) -> None:
        socket.on("framereceived", count)
        socket.on("framesent", count)

    def listen_to(page: Any) -> None:
        page.on("websocket", listen)

    lab.context.on("page", listen_to)
    try:
        yield counts
    finally:
        lab.context.remove_listener("page", listen_to)


# --- a million blocks --------------------------------------------------------------------------


def measure_million(lab: Lab, options: argparse.Namespace) -> Result:
    stamps, page = _run_scripted(lab, "million", 1_000_000, 60, options.seconds)
    sizes: dict[str, list[float]] = {"full": [], "delta": []}
    for _, _, _, kind, header, parts, _, is_binned, _ in stamps["sent"]:
        if not is_binned:
            raise RuntimeError("a frame of a million blocks came without bins")
        sizes[kind].append(header + parts)
    numbers = {
        "bytes of a delta, 1,000,000 blocks, 60 requests": sizes["delta"],
        "bytes of a full frame, 1,000,000 blocks, 60 requests": sizes["full"],
        "ms, drawing, 1,000,000 blocks, 60 requests": page["drawings"],
        "ms, handing a frame over, 1,000,000 blocks": [1000 * one[-1] for one in stamps["sent"]],
    }
    largest = max(sizes["delta"] + sizes["full"])
    return numbers, [
        Goal("bytes of the largest frame, 1,000,000 blocks", largest, 65_535),
        Goal("drawing 1,000,000 blocks, p95 in ms", percentile(page["drawings"], 95), 20),
    ]


# --- throughput ------------------------------------------------------------------------------


def measure_throughput(lab: Lab, options: argparse.Namespace) -> Result:
    # Seeing when pixels are there takes an animation frame more for each drawing.
    lab.init_script = ""
    session = Session(
        lab,
        "throughput",
        "llm = demo_engine()",
        watch=f"view = watch(llm, rate_hz={RATE_HZ})",
        close="view.close()",
        generate=f"print_json(generate(llm, '{options.requests}x20', {options.output_tokens}))",
    )
    results: dict[str, list[dict[str, float]]] = {"open": [], "bare": []}
    for pair in range(-1, options.pairs):  # the first pair warms up and does not count
        for which in ("open", "bare") if pair % 2 else ("bare", "open"):
            if which == "open":
                session.run("watch")
                session.wait_for_view()
            result = session.run("generate")
            if which == "open":
                session.run("close")
            if pair >= 0:
                results[which].append(result)
    opened, bare = results["open"], results["bare"]
    ratio = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(opened, bare, strict=True)]
    numbers = {
        "tokens a second, dashboard open": [one["tokens_per_s"] for one in opened],
        "tokens a second, bare": [one["tokens_per_s"] for one in bare],
        "ratio of tokens a second, open / bare": ratio,
    }
    for name, words in (("engine_cpu_s", "engine thread"), ("process_cpu_s", "whole kernel")):
        for which, ones in results.items():
            shown = "dashboard open" if which == "open" else "bare"
            numbers[f"µs of CPU time a token, {words}, {shown}"] = [
                one[name] / one["tokens"] * 1e6 for one in ones
            ]
    return numbers, [Goal("tokens a second, open / bare", statistics.median(ratio), 0.92, False)]


MEASURES: dict[str, Callable[[Lab, argparse.Namespace], Result]] = {
    "clicks": measure_clicks,
    "pixels": measure_pixels,
    "frames": measure_frames,
    "million": measure_million,
    "throughput": measure_throughput,
}


# --- arithmetic --------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """The least of the values that `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def table(measured: dict[str, list[float]]) -> list[str]:
    """Lines of a Markdown table, one for each thing that was measured."""
    lines = ["| | n | median | quartiles | p95 | most |", "|---|---|---|---|---|---|"]
    for what, values in measured.items():
        if not values:
            continue
        low, median, high = map(_number, quartiles(values))
        p95, most = _number(percentile(values, 95)), _number(max(values))
        lines.append(f"| {what} | {len(values)} | {median} | {low} to {high} | {p95} | {most} |")
    return lines


def _number(value: float) -> str:
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}"


def verdict(goals: Sequence[Goal]) -> list[str]:
    """A line for each goal."""
    return [
        f"{goal.what}: {'met' if goal.is_met else 'MISSED'}, {_number(goal.value)}, the goal is "
        f"at {'most' if goal.is_most else 'least'} {goal.limit:g}"
        for goal in goals
    ]


if __name__ == "__main__":
    sys.exit(main())
