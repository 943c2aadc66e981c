"""The %lmscope magic in a shell without a kernel."""

from __future__ import annotations

import _thread
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import lmscope
from lmscope import SamplingParams, SchedulerOutput, notebook
from lmscope.llm import LLM
from lmscope.magic_commands import COMMANDS, Outputs, split_prompts


@pytest.fixture
def shell() -> Iterator[Any]:
    """A shell with the extension loaded and nothing else in it."""
    shell = InteractiveShell.instance()
    before = dict(shell.user_ns)
    notebook.load_ipython_extension(shell)
    yield shell
    notebook.unload_ipython_extension(shell)
    for name in set(shell.user_ns) - set(before):
        del shell.user_ns[name]


def make_engine() -> LLM:
    return LLM(
        "scripted",
        execute="scripted",
        script=lambda request_id, position: ord("abc"[position % 3]),
        block_size=4,
        num_kv_blocks=64,
    )


@pytest.fixture
def engine(shell: Any) -> Iterator[LLM]:
    with make_engine() as engine:
        shell.user_ns["llm"] = engine
        yield engine


def line(shell: Any, text: str) -> Any:
    return shell.run_line_magic("lmscope", text)


def cell(shell: Any, text: str, body: str) -> Any:
    return shell.run_cell_magic("lmscope", text, body)


def test_generates_from_the_prompts_of_a_cell(shell: Any, engine: LLM) -> None:
    outputs = cell(shell, "generate -n 6 -q -o outputs", "first\n\nsecond\nline\n")

    assert outputs is None
    assert [output.prompt for output in shell.user_ns["outputs"]] == ["first", "second\nline"]
    assert [output.outputs[0].text for output in shell.user_ns["outputs"]] == ["abcabc"] * 2


def test_returns_the_outputs_and_shows_their_texts(
    shell: Any, engine: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.generate("x", use_tqdm=False)
    outputs = cell(shell, "generate -n 3", "a prompt")

    assert isinstance(outputs, list)
    assert isinstance(outputs[0], lmscope.RequestOutput)
    assert repr(outputs) == "[1] a prompt\nabc"


def test_braces_and_dollar_signs_of_prompts_survive(shell: Any, engine: LLM) -> None:
    shell.user_ns["x"] = "expanded"
    prompt = 'JSON {"a": {x}} costs $x and {1 + 1}'
    shell.run_cell(f"%%lmscope generate -n 2 -q -o outputs\n{prompt}\n").raise_error()

    assert shell.user_ns["outputs"][0].prompt == prompt


def test_hidden_characters_of_outputs_are_shown(shell: Any, engine: LLM) -> None:
    outputs = cell(shell, "generate -n 1", "turn \u202e and \x1b[31m")

    assert "turn <U+202E> and <0x1B>[31m" in repr(outputs)


def test_parameters_come_from_the_line_and_else_from_the_settings(
    shell: Any, engine: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def generate(prompts: Any, params: Any, *, use_tqdm: bool) -> list[Any]:
        seen.append((params.max_tokens, params.temperature, params.seed, use_tqdm))
        return []

    monkeypatch.setattr(engine, "generate", generate)
    cell(shell, "generate", "x")
    cell(shell, "generate llm -n 5 -t 0.8 --seed 1 --quiet", "x")
    shell.run_line_magic("config", "LMScope.max_tokens = 7")
    shell.run_line_magic("config", "LMScope.progress = False")
    cell(shell, "generate", "x")

    assert seen == [(64, 0.0, None, True), (5, 0.8, 1, False), (7, 0.0, None, False)]


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ("one", ["one"]),
        ("one\ntwo\n", ["one\ntwo"]),
        ("\n\none\n\n\n  two\n", ["one", "  two"]),
        ("one\n\nstill one\n---\ntwo", ["one\n\nstill one", "two"]),
        ("---\n", []),
        ("", []),
        (" \n\t\n", []),
    ],
)
def test_splits_prompts(body: str, prompts: list[str]) -> None:
    assert split_prompts(body) == prompts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("explode", "no command 'explode'"),
        ("genrate", "did you mean generate"),
        ("status --nope", "unrecognized arguments: --nope"),
        ("generate -n few", "argument -n/--max-tokens: invalid int value: 'few'"),
        ("generate", "no prompt"),
        ("load", "the following arguments are required: model"),
        ("load demo -o not-a-name", "'not-a-name' is no name for a variable"),
        ("load /nowhere/model --block-size 0", "block_size is 0"),
        ("watch nobody", "nobody is no engine; the engines here are llm"),
        ("watch --views blok", "did you mean 'blocks'"),
        ("watch --colour atention", "did you mean 'attention'"),
        ("watch --colour attention", "there is no attention"),
        ("debug --colour atention", "did you mean 'attention'"),
        ("record --attention", "there is no attention"),
        ("save x.lmscope nothing", "nothing is no recording"),
        ("step Nothing", "there is no one struct 'Nothing'"),
        ("step -c 0", "count is 0"),
        ("step", "the engine has no request"),
        ("step -e nobody", "nobody is no engine"),
        ("pause nobody", "nobody is no engine"),
        ("why 77", "request id is '77', which is not live"),
        ("why 0 -s 3", "rec is no engine and no recording"),
        ("why", "the following arguments are required: request"),
        ("replay /nowhere.lmscope", "No such file or directory"),
        ("replay /nowhere.lmscope --speed fast", "invalid float value"),
        ("debug --views blok", "did you mean 'blocks'"),
        ("debug -o if", "'if' is no name for a variable"),
    ],
)
def test_a_wrong_line_is_one_sentence_without_a_traceback(
    shell: Any, engine: LLM, text: str, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        line(shell, text)

    assert words in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__cause__ is None


def test_attention_is_measured_by_a_recording_and_by_a_view_of_its_colour(
    shell: Any, engine: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[int] = []

    class Measure:
        def __init__(self, engine: LLM) -> None:
            opened.append(1)

        def close(self) -> None:
            opened.append(-1)

    monkeypatch.setattr(LLM, "measure_attention", lambda engine: Measure(engine))
    line(shell, "record llm")
    assert sum(opened) == 0
    line(shell, "record llm -o measured --attention")
    assert sum(opened) == 1
    line(shell, "watch llm --colour attention -o view")
    assert sum(opened) == 2
    assert shell.user_ns["view"].colour == "attention"
    shell.user_ns["view"].close()
    cell(shell, "generate -n 2 -q", "first")
    file = tmp_path / "run.lmscope"
    line(shell, f"save {file} measured")
    assert sum(opened) == 0
    line(shell, f"replay {file} --colour attention")
    assert sum(opened) == 0, "a replay has what was recorded"


def test_errors_of_a_request_are_one_sentence(
    shell: Any, engine: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%%lmscope generate -n 5 -t -1\nx\n")

    shown = capsys.readouterr()
    assert "UsageError: temperature is -1" in shown.err + shown.out
    assert "Traceback" not in shown.err + shown.out


def test_an_interrupt_ends_what_the_cell_started_and_nothing_else(shell: Any, engine: LLM) -> None:
    other = engine.submit("from before", SamplingParams(max_tokens=200))

    def interrupt(output: SchedulerOutput) -> None:
        if output.step == 20:
            _thread.interrupt_main()

    with engine.tap.on(SchedulerOutput, interrupt), pytest.raises(KeyboardInterrupt):
        cell(shell, "generate -n 10000000 -q", "endless")

    assert len(other.wait(200).token_ids) == 200
    assert "0 live requests" in repr(engine)
    assert engine.generate("again", SamplingParams(max_tokens=3), use_tqdm=False)[0].finished


def test_a_command_that_takes_no_cell_says_so(shell: Any, engine: LLM) -> None:
    with pytest.raises(UsageError, match="status takes no cell"):
        cell(shell, "status", "text")


def test_names_the_engines(shell: Any, engine: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    line(shell, "")
    shell.user_ns["again"] = engine
    line(shell, "status")

    assert capsys.readouterr().out == f"llm = {engine!r}\n" * 2


def test_says_how_to_begin(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    line(shell, "status")
    assert "%lmscope load demo" in capsys.readouterr().out

    with pytest.raises(UsageError, match="no engine yet"):
        line(shell, "watch")


def test_asks_which_engine_when_there_are_several(shell: Any, engine: LLM) -> None:
    with make_engine() as other:
        shell.user_ns["other"] = other
        del shell.user_ns["llm"]
        shell.user_ns["third"] = engine
        with pytest.raises(UsageError, match="several engines: other, third"):
            line(shell, "close")


def test_load_stores_the_engine_and_closes_the_one_before(
    shell: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []

    def load(model: str, **options: Any) -> LLM:
        made.append((model, options))
        return make_engine()

    monkeypatch.setattr("lmscope.llm.LLM", load)
    line(shell, "load demo --block-size 8 --num-kv-blocks 99 --no-prefix-caching")
    first = shell.user_ns["llm"]
    line(shell, "load demo")
    second = shell.user_ns["llm"]

    assert made == [
        ("demo", {"block_size": 8, "num_kv_blocks": 99, "enable_prefix_caching": False}),
        ("demo", {}),
    ]
    assert "closed" in repr(first)
    assert "closed" not in repr(second)
    assert "closed the engine that llm was" in capsys.readouterr().out
    line(shell, "close")
    assert "closed" in repr(second)


def test_unloading_closes_what_was_loaded_and_removes_the_magic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = InteractiveShell.instance()
    notebook.load_ipython_extension(shell)
    monkeypatch.setattr("lmscope.llm.LLM", lambda model: make_engine())
    line(shell, "load demo")
    notebook.unload_ipython_extension(shell)

    assert "closed" in repr(shell.user_ns.pop("llm"))
    assert "lmscope" not in shell.magics_manager.magics["line"]
    assert "lmscope" not in shell.magics_manager.magics["cell"]
    assert not any(type(c).__name__ == "LMScope" for c in shell.configurables)
    notebook.unload_ipython_extension(shell)  # twice is fine


def test_records_and_saves(shell: Any, engine: LLM, tmp_path: Path) -> None:
    path = tmp_path / "run.lmscope"
    line(shell, "record")
    cell(shell, "generate -n 4 -q", "hello")
    line(shell, f"save {path}")

    assert not engine.tap.is_live
    recording = lmscope.open_recording(path)
    assert [record.text for record in recording.at().requests.values()] == ["abca"]


def test_stops_steps_and_resumes_the_engine(
    shell: Any, engine: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    line(shell, "pause")
    assert "stops at the first boundary to come" in capsys.readouterr().out
    stream = engine.submit("hello", SamplingParams(max_tokens=5))
    assert isinstance(line(shell, "step"), lmscope.EngineCoreRequest)
    assert line(shell, "step model -c 2").step == 2
    line(shell, "pause llm")
    assert "stands at ModelRunnerOutput of step 2" in capsys.readouterr().out
    line(shell, "status")
    assert "1 live requests>, stands at ModelRunnerOutput of step 2" in capsys.readouterr().out
    line(shell, "resume")
    assert stream.wait(200).finished


def test_debugs_an_engine_under_a_name_of_its_own(
    shell: Any, engine: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    line(shell, "debug -o d")
    first = shell.user_ns["d"]
    first.break_on("finish")
    assert "<Debugger of scripted: paused before the next struct" in capsys.readouterr().out
    line(shell, "debug llm -o d --views blocks")
    assert shell.user_ns["d"] is not first
    assert engine.gate.breakpoints == ()
    assert engine.gate.is_closed
    line(shell, "close d")
    assert not engine.gate.is_closed


def test_says_why_a_request_waits_now_and_in_a_recording(shell: Any, engine: LLM) -> None:
    line(shell, "record")
    line(shell, "pause")
    engine.submit("hello", SamplingParams(max_tokens=5))
    line(shell, "step scheduler")
    assert "prefill: 5 tokens" in str(line(shell, "why 0"))
    line(shell, "resume")
    cell(shell, "generate -n 2 -q", "x")
    assert "prefill: 5 tokens" in str(line(shell, "why 0 --step 1"))
    assert "prefill: 5 tokens" in str(line(shell, "why 0 --step 1 -e rec"))


def test_replays_a_file_or_a_variable(shell: Any, engine: LLM, tmp_path: Path) -> None:
    line(shell, "record")
    cell(shell, "generate -n 4 -q", "hello")
    line(shell, f"save {tmp_path / 'run.lmscope'}")
    line(shell, "replay rec --speed 1000")
    first = shell.user_ns["player"]
    assert first.speed == 1000
    line(shell, f"replay {tmp_path / 'run.lmscope'}")
    player = shell.user_ns["player"]
    with pytest.raises(lmscope.EngineClosedError, match="was closed"):
        first.seek(1)

    line(shell, "debug player")
    assert line(shell, "step scheduler -e player").step == 1
    line(shell, "close player")
    with pytest.raises(lmscope.EngineClosedError, match="was closed"):
        player.seek(1)


def test_a_replay_is_the_source_where_there_is_no_engine(shell: Any) -> None:
    with make_engine() as engine, lmscope.record(engine) as recording:
        engine.generate("hello", SamplingParams(max_tokens=3), use_tqdm=False)
    shell.user_ns["kept"] = recording
    line(shell, "replay kept")
    assert isinstance(line(shell, "step"), lmscope.EngineCoreRequest)


def test_unloading_ends_debuggers_recordings_and_replays(shell: Any, engine: LLM) -> None:
    line(shell, "record")
    cell(shell, "generate -n 4 -q", "hello")
    line(shell, "replay rec")
    line(shell, "debug")
    names = shell.user_ns
    notebook.unload_ipython_extension(shell)

    assert not names["rec"].is_open
    assert not names["dbg"].view.is_open
    assert not engine.gate.is_closed
    with pytest.raises(lmscope.EngineClosedError):
        names["player"].seek(1)
    assert engine.generate("again", SamplingParams(max_tokens=1), use_tqdm=False)
    assert not engine.tap.is_live


def test_help_is_made_from_the_arguments(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for name in COMMANDS:
        assert f"%lmscope {name}" in shell.find_line_magic("lmscope").__doc__
    line(shell, "generate --help")

    shown = capsys.readouterr().out
    assert shown.startswith("%%lmscope generate [-n N]")
    assert "::" not in shown
    assert shown.count("lmscope") == 1
    assert "--max-tokens" in shown
    assert "separated by blank lines" in shown


@pytest.mark.parametrize(
    ("text", "offered", "not_offered"),
    [
        ("%lmscope ", "generate", "--seed"),
        ("%lmscope wa", "watch", "generate"),
        ("%lmscope generate --se", "--seed", "--view"),
        ("%lmscope watch l", "llm", "load"),
        ("%%lmscope gen", "generate", "watch"),
        ("%lmscope step Sch", "SchedulerOutput", "RequestOutput"),
        ("%lmscope why wait", "waiting one", "llm"),
        ("%lmscope debug l", "llm", "load"),
        ("%lmscope replay re", "recording", "llm"),
    ],
)
def test_completes_commands_options_and_engines(
    shell: Any, engine: LLM, text: str, offered: str, not_offered: str
) -> None:
    engine.gate.pause()
    engine.submit("x", request_id="waiting one")
    with lmscope.record(engine) as shell.user_ns["recording"]:
        pass
    with provisionalcompleter():
        found = shell.complete(None, text, len(text))[1]

    assert offered in found
    assert not_offered not in found


def test_settings_are_listed_and_checked(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    shell.run_line_magic("config", "LMScope")
    assert "LMScope.rate" in capsys.readouterr().out

    shell.run_line_magic("config", "LMScope.rate = 5")
    assert shell.magics_manager.registry["LMScope"].rate == 5


def test_outputs_is_a_list() -> None:
    assert Outputs() == []
    assert repr(Outputs()) == ""
