"""The %lmscope magic: each sub-command is a thin call of a public function.

    %lmscope load demo --num-kv-blocks 64
    %lmscope watch
    %%lmscope generate -n 32 -o outputs
    The capital of France is
    ---
    A haiku about rain:

Nothing in a line or a cell is expanded, so braces and dollar signs of prompts stay as they
are. A wrong argument is one line, without a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import (
    MagicArgumentParser,
    argument,
    construct_parser,
    magic_arguments,
)
from traitlets import Bool, Float, Int

from lmscope.boundary import RequestOutput
from lmscope.checks import nearest
from lmscope.errors import LmscopeError
from lmscope.sampling_params import SamplingParams
from lmscope.scope.visible import visible

__all__ = ["LMScope", "Outputs", "split_prompts"]


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


@magic_arguments("%lmscope load")
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
def _load(self: LMScope, arguments: Any, cell: str | None) -> None:
    """Load a model and store the engine in a variable.

    An engine that the same variable got from an earlier load is closed first.
    """
    from lmscope.llm import LLM

    name = _variable(arguments.out)
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
    earlier = self.loaded.pop(name, None)
    if earlier is not None:
        earlier.close()
        _say(f"closed the engine that {name} was")
    engine = self.loaded[name] = LLM(arguments.model, **options)
    self.shell.user_ns[name] = engine
    _say(f"{name} = {engine!r}")


@magic_arguments("%lmscope status")
def _status(self: LMScope, arguments: Any, cell: str | None) -> None:
    """Name the engines of this notebook and say how they stand."""
    engines = self.engines()
    for name, engine in engines.items():
        _say(f"{name} = {engine!r}")
    if not engines:
        _say("no engine yet; %lmscope load demo loads one")


@magic_arguments("%lmscope watch")
@argument("name", nargs="?", help="variable with the engine")
@argument("--views", metavar="NAMES", help="views to show, separated by commas")
@argument("-o", "--out", metavar="NAME", help="store the view as NAME")
def _watch(self: LMScope, arguments: Any, cell: str | None) -> None:
    """Show a running engine."""
    from lmscope.notebook import watch

    name = None if arguments.out is None else _variable(arguments.out)
    view = watch(self.engine(arguments.name), views=_words(arguments.views), rate_hz=self.rate)
    if name is not None:
        self.shell.user_ns[name] = view


@magic_arguments("%%lmscope generate")
@argument("name", nargs="?", help="variable with the engine")
@argument("-n", "--max-tokens", type=int, metavar="N", help="most tokens of each output")
@argument("-t", "--temperature", type=float, metavar="T", help="0 is greedy")
@argument("--seed", type=int, metavar="N", help="seed of the random draws")
@argument("-o", "--out", metavar="NAME", help="store the outputs as NAME and show nothing")
@argument("--view", action="store_true", help="show the engine while it runs")
@argument("--views", metavar="NAMES", help="the same, with these views")
@argument("-q", "--quiet", action="store_true", help="no progress bar and no outputs")
def _generate(self: LMScope, arguments: Any, cell: str | None) -> Outputs | None:
    """Run the prompts of the cell, separated by blank lines or by lines of ---.

    Interrupting the cell ends what it has started; the engine stays usable.
    """
    prompts = split_prompts(cell or "")
    if not prompts:
        raise UsageError("no prompt; write one or more below the first line, with %%lmscope")
    name = None if arguments.out is None else _variable(arguments.out)
    engine = self.engine(arguments.name)
    temperature = self.temperature if arguments.temperature is None else arguments.temperature
    params = SamplingParams(
        max_tokens=self.max_tokens if arguments.max_tokens is None else arguments.max_tokens,
        temperature=temperature,
        seed=arguments.seed,
    )
    if arguments.view or arguments.views:
        from lmscope.notebook import watch

        watch(engine, views=_words(arguments.views), rate_hz=self.rate)
    use_tqdm = self.progress and not arguments.quiet
    outputs = Outputs(engine.generate(prompts, params, use_tqdm=use_tqdm))
    if name is not None:
        self.shell.user_ns[name] = outputs
    return None if name is not None or arguments.quiet else outputs


@magic_arguments("%lmscope record")
@argument("name", nargs="?", help="variable with the engine")
@argument("-o", "--out", default="rec", metavar="NAME", help="store it as NAME (rec)")
def _record(self: LMScope, arguments: Any, cell: str | None) -> None:
    """Begin a recording; it grows until it is saved or closed."""
    from lmscope.scope.recording import record

    name = _variable(arguments.out)
    recording = record(self.engine(arguments.name))
    recording.__enter__()
    self.shell.user_ns[name] = recording
    _say(f"recording as {name}; %lmscope save FILE {name} ends and saves it")


@magic_arguments("%lmscope save")
@argument("file", help="path to write, by habit with .lmscope at the end")
@argument("name", nargs="?", default="rec", help="variable with the recording (rec)")
def _save(self: LMScope, arguments: Any, cell: str | None) -> None:
    """End a recording and write it to a file."""
    recording = self.shell.user_ns.get(arguments.name)
    if not hasattr(recording, "save"):
        raise UsageError(f"{arguments.name} is no recording; %lmscope record begins one")
    recording.__exit__(None, None, None)
    recording.save(arguments.file)
    _say(f"saved {arguments.file}")


@magic_arguments("%lmscope close")
@argument("name", nargs="?", help="variable with the engine")
def _close(self: LMScope, arguments: Any, cell: str | None) -> None:
    """Close an engine: end its requests, give its memory back."""
    engine = self.engine(arguments.name)
    engine.close()
    for name, other in list(self.loaded.items()):
        if other is engine:
            del self.loaded[name]


_COMMANDS: dict[str, Callable[[LMScope, Any, str | None], Any]] = {
    "status": _status,
    "load": _load,
    "watch": _watch,
    "generate": _generate,
    "record": _record,
    "save": _save,
    "close": _close,
}
_PARSERS: dict[str, MagicArgumentParser] = {
    name: construct_parser(function) for name, function in _COMMANDS.items()
}


def _help() -> str:
    """The help of the magic, made from the arguments of its sub-commands."""
    lines = ["The inference engine of this notebook.", ""]
    for name, function in _COMMANDS.items():
        usage = " ".join(_PARSERS[name].format_usage().removeprefix("usage:").split())
        lines += ["::", "", f"  {usage}", "", (function.__doc__ or "").splitlines()[0], ""]
    lines += [
        "`%lmscope COMMAND --help` says more. Without a command: status. Settings:",
        "`%config LMScope` lists them, `%config LMScope.rate = 20` sets one.",
    ]
    return "\n".join(lines)


@magics_class
class LMScope(Magics):
    __doc__ = __doc__

    rate = Float(10.0, help="Pictures a second of a view, at most 20.").tag(config=True)
    max_tokens = Int(64, help="Most tokens of an output, unless -n is given.").tag(config=True)
    temperature = Float(0.0, help="Temperature, unless -t is given; 0 is greedy.").tag(config=True)
    progress = Bool(True, help="Whether generate shows a progress bar.").tag(config=True)

    def __init__(self, shell: Any) -> None:
        super().__init__(shell=shell, parent=shell)
        # engines that `load` made, by variable
        self.loaded: dict[str, Any] = {}

    @no_var_expand
    @line_cell_magic
    def lmscope(self, line: str, cell: str | None = None) -> Any:
        command, _, rest = line.strip().partition(" ")
        command = command or ("status" if cell is None else "generate")
        if command in ("-h", "--help", "help"):
            _say(_help())
            return None
        if command not in _COMMANDS:
            raise UsageError(
                f"%lmscope has no command {command!r}; {nearest(command, list(_COMMANDS))}; "
                f"it has {', '.join(_COMMANDS)}"
            )
        if cell is not None and command != "generate":
            raise UsageError(f"{command} takes no cell; write %lmscope {command} on one line")
        parser = _PARSERS[command]
        if rest.split()[:1] in (["-h"], ["--help"]):
            _say(parser.format_help())
            return None
        try:
            return _COMMANDS[command](self, parser.parse_argstring(rest), cell)
        except (LmscopeError, ValueError, TypeError, FileNotFoundError) as error:
            raise UsageError(str(error)) from None

    lmscope.__doc__ = _help()

    def engines(self) -> dict[str, Any]:
        """The engines among the variables of the notebook, each once, by name."""
        found: dict[str, Any] = {}
        for name, value in self.shell.user_ns.items():
            is_new = not any(value is other for other in found.values())
            if not name.startswith("_") and is_new and _is_engine(value):
                found[name] = value
        return found

    def engine(self, name: str | None) -> Any:
        """The engine of that name; without one `llm`, or the only engine that there is."""
        engines = self.engines()
        if name is not None:
            value = self.shell.user_ns.get(name)
            if not _is_engine(value):
                known = ", ".join(engines) or "none; %lmscope load demo loads one"
                raise UsageError(f"{name} is no engine; the engines here are {known}")
            return value
        if _is_engine(self.shell.user_ns.get("llm")):
            return self.shell.user_ns["llm"]
        if not engines:
            raise UsageError("no engine yet; %lmscope load demo loads one")
        if len(engines) > 1:
            raise UsageError(f"there are several engines: {', '.join(engines)}; name one of them")
        return next(iter(engines.values()))

    # -- installing ----------------------------------------------------------------------

    @classmethod
    def install(cls, shell: Any) -> None:
        magics = cls(shell)
        shell.register_magics(magics)
        if magics not in shell.configurables:
            shell.configurables.append(magics)
        for prefix in ("%lmscope", "%%lmscope"):
            shell.set_hook("complete_command", magics.complete, str_key=prefix)

    @classmethod
    def uninstall(cls, shell: Any) -> None:
        magics = shell.magics_manager.registry.pop(cls.__name__, None)
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop("lmscope", None)
        for prefix in ("%lmscope", "%%lmscope"):
            shell.strdispatchers["complete_command"].strs.pop(prefix, None)
        if magics is not None:
            if magics in shell.configurables:
                shell.configurables.remove(magics)
            for engine in magics.loaded.values():
                engine.close()

    def complete(self, shell: Any, event: Any) -> list[str]:
        """What may follow on the line: sub-commands, then options and engines."""
        words = event.line.split()
        is_first = len(words) < 2 or (len(words) == 2 and not event.line.endswith(" "))
        if is_first:
            return list(_COMMANDS)
        command = words[1]
        if command not in _COMMANDS:
            return []
        options = [
            option for action in _PARSERS[command]._actions for option in action.option_strings
        ]
        return [*options, *self.engines()]


def _is_engine(value: object) -> bool:
    return hasattr(value, "tap") and hasattr(value, "generate") and not isinstance(value, type)


def _variable(name: str) -> str:
    if not name.isidentifier():
        raise UsageError(f"{name!r} is no name for a variable")
    return name


def _words(text: str | None) -> Sequence[str] | None:
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
