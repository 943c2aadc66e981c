"""The sub-commands of %lmscope: their arguments, and the public function that each calls."""

from __future__ import annotations

import keyword
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic_arguments import (
    MagicArgumentParser,
    argument,
    magic_arguments,
)

from lmscope.boundary import BOUNDARIES, Boundary, RequestOutput
from lmscope.sampling_params import SamplingParams
from lmscope.scope.breakpoints import kind_named
from lmscope.scope.visible import visible

if TYPE_CHECKING:
    from lmscope.magic import LMScope
    from lmscope.scope.questions import Why

__all__ = [
    "COMMANDS",
    "PARSERS",
    "Outputs",
    "command_help",
    "help_text",
    "say",
    "split_prompts",
    "suggestions",
]


class Outputs(list[RequestOutput]):
    """What `%%lmscope generate` returns: a list of RequestOutput that shows their texts."""

    def __repr__(self) -> str:
        parts = []
        for output in self:
            prompt = " ".join(visible(output.prompt or "").split())
            prompt = prompt if len(prompt) <= 100 else "…" + prompt[-99:]
            texts = "\n".join(visible(completion.text) for completion in output.outputs)
            parts.append(f"[{output.request_id}] {prompt}\n{texts.strip()}")
        return "\n\n".join(parts)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))


def split_prompts(cell: str) -> list[str]:
    """The prompts of a cell: separated by lines of `---` if there are any, else by blank lines.

    Line ends and spaces inside a prompt stay; blank lines around it go.
    """
    lines = cell.splitlines()
    is_rule = [line.strip() == "---" for line in lines]
    ends = is_rule if any(is_rule) else [not line.strip() for line in lines]
    groups: list[list[str]] = [[]]
    for line, is_end in zip(lines, ends, strict=True):
        if is_end:
            groups.append([])
        else:
            groups[-1].append(line)
    prompts = ("\n".join(group).strip("\n") for group in groups)
    return [prompt for prompt in prompts if prompt.strip()]


# -- the arguments of each sub-command ------------------------------------------------------


@magic_arguments("lmscope load")
@argument("model", help='"demo", a hub id, a folder or a .gguf file')
@argument("-o", "--out", default="llm", metavar="NAME", help="store the engine as NAME (llm)")
@argument("--block-size", type=int, metavar="N", help="tokens per KV block")
@argument("--num-kv-blocks", type=int, metavar="N", help="blocks of the KV cache")
@argument("--max-model-len", type=int, metavar="N", help="most tokens of a request")
@argument("--max-num-seqs", type=int, metavar="N", help="most requests in a step")
@argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens in a step")
@argument("--seed", type=int, metavar="N", help="seed of requests without one")
@argument("--threads", type=int, metavar="N", help="torch threads of the engine")
@argument("--dtype", metavar="NAME", help="float32, bfloat16, float16 or auto")
@argument("--device", metavar="NAME", help="cpu, cuda or auto")
@argument("--no-prefix-caching", action="store_true", help="compute every prompt afresh")
@argument("--no-chunked-prefill", action="store_true", help="compute prompts in one piece")
def _load(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Load a model and store the engine in a variable.

    An engine that the same variable got from an earlier load is closed first.
    """
    from lmscope.llm import LLM

    name = variable(arguments.out)
    options = {
        key: value
        for key in (
            "block_size",
            "num_kv_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "seed",
            "threads",
            "dtype",
            "device",
        )
        if (value := getattr(arguments, key)) is not None
    }
    if arguments.no_prefix_caching:
        options["enable_prefix_caching"] = False
    if arguments.no_chunked_prefill:
        options["enable_chunked_prefill"] = False
    if magic.close_made(name):
        say(f"closed the engine that {name} was")
    engine = LLM(arguments.model, **options)
    magic.keep(name, engine)
    say(f"{name} = {engine!r}")


@magic_arguments("lmscope status")
def _status(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Name the engines and replays of this notebook and say how they stand."""
    sources = magic.sources()
    for name, source in sources.items():
        at = source.gate.at if hasattr(source, "gate") else None
        stands = f", stands at {_place(at)}" if at is not None else ""
        say(f"{name} = {source!r}{stands}")
    if not sources:
        say("no engine yet; %lmscope load demo loads one")


@magic_arguments("lmscope watch")
@argument("name", nargs="?", help="variable with the engine")
@argument("--views", metavar="NAMES", help="views to show, separated by commas")
@argument("--colour", default="owner", metavar="BY", help="of blocks: owner or attention (owner)")
@argument("-o", "--out", metavar="NAME", help="store the view as NAME")
def _watch(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Show a running engine, or a replay."""
    from lmscope.notebook import watch

    name = None if arguments.out is None else variable(arguments.out)
    view = watch(
        magic.source(arguments.name),
        views=_words(arguments.views),
        colour=arguments.colour,
        rate_hz=magic.rate,
    )
    if name is not None:
        magic.shell.user_ns[name] = view


@magic_arguments("lmscope debug")
@argument("name", nargs="?", help="variable with the engine or the replay")
@argument("--views", metavar="NAMES", help="views to show, separated by commas")
@argument("--colour", default="owner", metavar="BY", help="of blocks: owner or attention (owner)")
@argument("-o", "--out", default="dbg", metavar="NAME", help="store the debugger as NAME (dbg)")
def _debug(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Stop an engine at the next boundary and show it with the buttons of its gate."""
    from lmscope.notebook import debug

    name = variable(arguments.out)
    source = magic.source(arguments.name)
    magic.close_made(name)
    views = _words(arguments.views)
    magic.keep(name, debug(source, views=views, colour=arguments.colour, rate_hz=magic.rate))
    say(repr(magic.shell.user_ns[name]))


@magic_arguments("lmscope step")
@argument("kind", nargs="?", help="struct to stop at, or a part of its name: model, scheduler")
@argument("-c", "--count", type=int, default=1, metavar="N", help="how often (1)")
@argument("-e", "--engine", metavar="NAME", help="variable with the engine or the replay")
def _step(magic: LMScope, arguments: Any, cell: str | None) -> Boundary | None:
    """Let the engine run to the next boundary, or to the next of one kind; returns the struct."""
    kind = None if arguments.kind is None else kind_named(arguments.kind)
    if arguments.count < 1:
        raise ValueError(f"count is {arguments.count}; it must be at least 1")
    gate = magic.gate(arguments.engine)
    at: Boundary | None = None
    for _ in range(arguments.count):
        at = gate.step(kind)
    return at


@magic_arguments("lmscope pause")
@argument("name", nargs="?", help="variable with the engine or the replay")
def _pause(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Stop the engine at the next boundary."""
    at = magic.gate(arguments.name).pause()
    say(f"stands at {_place(at)}" if at is not None else "stops at the first boundary to come")


@magic_arguments("lmscope resume")
@argument("name", nargs="?", help="variable with the engine or the replay")
def _resume(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Let the engine run; breakpoints stay."""
    magic.gate(arguments.name).resume()


@magic_arguments("lmscope why")
@argument("request", help="id of the request")
@argument("-s", "--step", type=int, metavar="N", help="step that is asked for, of a recording")
@argument("-e", "--engine", metavar="NAME", help="variable with the engine or the recording")
def _why(magic: LMScope, arguments: Any, cell: str | None) -> Why:
    """Say why a request runs or waits, and what would let it run."""
    name = arguments.engine
    if name is None and arguments.step is not None:
        name = "rec"
    told = magic.shell.user_ns.get(name) if name is not None else magic.engine(None)
    if not hasattr(told, "why"):
        raise UsageError(f"{name} is no engine and no recording; name one with -e")
    why: Why = (
        told.why(arguments.request)
        if arguments.step is None
        else told.why(arguments.request, step=arguments.step)
    )
    return why


@magic_arguments("%lmscope generate")
@argument("name", nargs="?", help="variable with the engine")
@argument("-n", "--max-tokens", type=int, metavar="N", help="most tokens of each output")
@argument("-t", "--temperature", type=float, metavar="T", help="0 is greedy")
@argument("--seed", type=int, metavar="N", help="seed of the random draws")
@argument("-o", "--out", metavar="NAME", help="store the outputs as NAME and show nothing")
@argument("--view", action="store_true", help="show the engine while it runs")
@argument("--views", metavar="NAMES", help="the same, with these views")
@argument("-q", "--quiet", action="store_true", help="no progress bar and no outputs")
def _generate(magic: LMScope, arguments: Any, cell: str | None) -> Outputs | None:
    """Run the prompts of the cell, separated by blank lines or by lines of ---.

    Interrupting the cell ends what it has started; the engine stays usable.
    """
    prompts = split_prompts(cell or "")
    if not prompts:
        raise UsageError("no prompt; write one or more below the first line, with %%lmscope")
    name = None if arguments.out is None else variable(arguments.out)
    engine = magic.engine(arguments.name)
    temperature = magic.temperature if arguments.temperature is None else arguments.temperature
    params = SamplingParams(
        max_tokens=magic.max_tokens if arguments.max_tokens is None else arguments.max_tokens,
        temperature=temperature,
        seed=arguments.seed,
    )
    if arguments.view or arguments.views:
        from lmscope.notebook import watch

        watch(engine, views=_words(arguments.views), rate_hz=magic.rate)
    use_tqdm = magic.progress and not arguments.quiet
    outputs = Outputs(engine.generate(prompts, params, use_tqdm=use_tqdm))
    if name is not None:
        magic.shell.user_ns[name] = outputs
    return None if name is not None or arguments.quiet else outputs


@magic_arguments("lmscope record")
@argument("name", nargs="?", help="variable with the engine")
@argument("-o", "--out", default="rec", metavar="NAME", help="store it as NAME (rec)")
@argument("--attention", action="store_true", help="measure which blocks attention goes to")
def _record(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Begin a recording; it grows until it is saved or closed."""
    from lmscope.scope.recording import record

    name = variable(arguments.out)
    magic.close_made(name)
    magic.keep(name, record(magic.source(arguments.name), attention=arguments.attention))
    say(f"recording as {name}; %lmscope save FILE {name} ends and saves it")


@magic_arguments("lmscope save")
@argument("file", help="path to write, by habit with .lmscope at the end")
@argument("name", nargs="?", default="rec", help="variable with the recording (rec)")
def _save(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """End a recording and write it to a file."""
    recording = magic.shell.user_ns.get(arguments.name)
    if not hasattr(recording, "save"):
        raise UsageError(f"{arguments.name} is no recording; %lmscope record begins one")
    recording.__exit__(None, None, None)
    recording.save(arguments.file)
    say(f"saved {arguments.file}")


@magic_arguments("lmscope replay")
@argument("recording", help="file of a recording, or variable with one")
@argument("--speed", type=float, metavar="X", help="1 is as it was; without it as fast as can be")
@argument("--colour", default="owner", metavar="BY", help="of blocks: owner or attention (owner)")
@argument("-o", "--out", default="player", metavar="NAME", help="store it as NAME (player)")
def _replay(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Show a recording as if its engine ran again, with play, speed and a slider."""
    from lmscope.notebook import watch
    from lmscope.scope.replay import replay

    name = variable(arguments.out)
    known = magic.shell.user_ns.get(arguments.recording)
    made = replay(known if hasattr(known, "boundaries") else Path(arguments.recording))
    if arguments.speed is not None:
        made.speed = arguments.speed
    magic.close_made(name)
    magic.keep(name, made)
    watch(made, colour=arguments.colour, rate_hz=magic.rate)


@magic_arguments("lmscope close")
@argument("name", nargs="?", help="variable with an engine, a replay, a debugger or a recording")
def _close(magic: LMScope, arguments: Any, cell: str | None) -> None:
    """Close an engine: end its requests, give its memory back. Others are closed by name."""
    thing = magic.shell.user_ns.get(arguments.name)
    if arguments.name is None or not hasattr(thing, "close"):
        thing = magic.engine(arguments.name)
    thing.close()
    magic.forget(thing)


COMMANDS: dict[str, Callable[[LMScope, Any, str | None], Any]] = {
    "status": _status,
    "load": _load,
    "watch": _watch,
    "debug": _debug,
    "step": _step,
    "pause": _pause,
    "resume": _resume,
    "why": _why,
    "generate": _generate,
    "record": _record,
    "save": _save,
    "replay": _replay,
    "close": _close,
}
PARSERS: dict[str, MagicArgumentParser] = {
    # magic_arguments made them, and put their whole help in place of the docstrings.
    name: function.parser  # type: ignore[attr-defined]  # an attribute that the decorator sets
    for name, function in COMMANDS.items()
}


def help_text() -> str:
    """The help of the magic, made from the arguments of its sub-commands."""
    lines = ["The inference engine of this notebook.", ""]
    for parser in PARSERS.values():
        usage = " ".join(_plain(parser.format_usage()).split())
        lines += [usage, f"    {(parser.description or '').splitlines()[0]}", ""]
    lines += [
        "`%lmscope COMMAND --help` says more. Without a command: status. Settings:",
        "`%config LMScope` lists them, `%config LMScope.rate = 20` sets one.",
    ]
    return "\n".join(lines)


def command_help(command: str) -> str:
    """The help of one sub-command: usage, what it does, its arguments."""
    return _plain(PARSERS[command].format_help())


def _plain(text: str) -> str:
    """Without the marks around the usage, which are for documents and not for a notebook."""
    return text.removeprefix("::\n\n").lstrip()


def suggestions(magic: LMScope, command: str) -> list[str]:
    """What may follow a sub-command on its line: options, then names."""
    options = [option for action in PARSERS[command]._actions for option in action.option_strings]
    if command == "step":
        return [*options, *(kind.__name__ for kind in BOUNDARIES), *magic.sources()]
    if command == "why":
        live = [
            name for engine in magic.engines().values() for name in getattr(engine, "_live", ())
        ]
        return [*options, *live, *magic.engines()]
    if command in ("save", "replay"):
        return [*options, *magic.recordings()]
    if command in ("generate", "load"):
        return [*options, *magic.engines()]
    return [*options, *magic.sources()]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def variable(name: str) -> str:
    """The name, if a variable can have it."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{name!r} is no name for a variable")
    return name


def _words(text: str | None) -> Sequence[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _place(at: Boundary) -> str:
    return f"{type(at).__name__} of step {at.step}"
