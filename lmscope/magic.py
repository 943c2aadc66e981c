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

from collections.abc import Callable
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from traitlets import Bool, Float, Int

from lmscope.checks import nearest
from lmscope.debugger import gate_of
from lmscope.errors import LmscopeError
from lmscope.gate import Gate
from lmscope.magic_commands import COMMANDS, PARSERS, command_help, help_text, say, suggestions
from lmscope.scope.recording import Recording
from lmscope.tap import Tap

__all__ = ["LMScope"]


@magics_class
class LMScope(Magics):
    __doc__ = __doc__

    rate = Float(10.0, help="Pictures a second of a view, at most 20.").tag(config=True)
    max_tokens = Int(64, help="Most tokens of an output, unless -n is given.").tag(config=True)
    temperature = Float(0.0, help="Temperature, unless -t is given; 0 is greedy.").tag(config=True)
    progress = Bool(True, help="Whether generate shows a progress bar.").tag(config=True)

    def __init__(self, shell: Any) -> None:
        super().__init__(shell=shell, parent=shell)
        # engines, debuggers, recordings and replays that commands made, by variable
        self.made: dict[str, Any] = {}

    @no_var_expand
    @line_cell_magic
    def lmscope(self, line: str, cell: str | None = None) -> Any:
        command, _, rest = line.strip().partition(" ")
        command = command or ("status" if cell is None else "generate")
        if command in ("-h", "--help", "help"):
            say(help_text())
            return None
        if command not in COMMANDS:
            raise UsageError(
                f"%lmscope has no command {command!r}; {nearest(command, list(COMMANDS))}; "
                f"it has {', '.join(COMMANDS)}"
            )
        if cell is not None and command != "generate":
            raise UsageError(f"{command} takes no cell; write %lmscope {command} on one line")
        parser = PARSERS[command]
        if rest.split()[:1] in (["-h"], ["--help"]):
            say(command_help(command))
            return None
        try:
            return COMMANDS[command](self, parser.parse_argstring(rest), cell)
        except (LmscopeError, ValueError, TypeError, OSError) as error:
            raise UsageError(str(error)) from None

    lmscope.__doc__ = help_text()

    def engines(self) -> dict[str, Any]:
        """The engines among the variables of the notebook, each once, by name."""
        return self._variables(_is_engine)

    def sources(self) -> dict[str, Any]:
        """The engines, and whatever else emits the stream."""
        return self._variables(_is_source)

    def recordings(self) -> dict[str, Any]:
        return self._variables(lambda value: isinstance(value, Recording))

    def _variables(self, is_wanted: Callable[[object], bool]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in list(self.shell.user_ns.items()):
            is_new = not any(value is other for other in found.values())
            if not name.startswith("_") and is_new and is_wanted(value):
                found[name] = value
        return found

    def source(self, name: str | None) -> Any:
        """The engine or replay of that name; without one the engine, or the only replay."""
        if name is not None:
            value = self.shell.user_ns.get(name)
            return value if _is_source(value) else self.engine(name)
        if not self.engines():
            sources = self.sources()
            if len(sources) == 1:
                return next(iter(sources.values()))
        return self.engine(None)

    def gate(self, name: str | None) -> Gate:
        return gate_of(self.source(name))

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

    # -- what commands made ---------------------------------------------------------------

    def keep(self, name: str, thing: Any) -> None:
        """Store something in a variable and close it when the extension is unloaded."""
        self.made[name] = self.shell.user_ns[name] = thing

    def close_made(self, name: str) -> bool:
        """Close what an earlier command stored in a variable; whether there was any."""
        thing = self.made.pop(name, None)
        if thing is not None:
            thing.close()
        return thing is not None

    def forget(self, thing: Any) -> None:
        self.made = {name: other for name, other in self.made.items() if other is not thing}

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
            # The newest first: a debugger opens the gate of an engine that is still there.
            for name in reversed(list(magics.made)):
                magics.close_made(name)

    def complete(self, shell: Any, event: Any) -> list[str]:
        """What may follow on the line: sub-commands, then options and engines."""
        words = event.line.split()
        is_first = len(words) < 2 or (len(words) == 2 and not event.line.endswith(" "))
        if is_first:
            return list(COMMANDS)
        command = words[1]
        return suggestions(self, command) if command in COMMANDS else []


def _is_engine(value: object) -> bool:
    return hasattr(value, "tap") and hasattr(value, "generate") and not isinstance(value, type)


def _is_source(value: object) -> bool:
    return isinstance(getattr(value, "tap", None), Tap) and not isinstance(value, type)
