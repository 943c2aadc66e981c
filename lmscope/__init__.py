"""lmscope, the inference-engine microscope.

Public names are loaded when they are first used, so importing lmscope imports neither
torch nor pandas.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmscope.boundary import (
        EngineCoreOutputs as EngineCoreOutputs,
        EngineCoreRequest as EngineCoreRequest,
        ModelRunnerOutput as ModelRunnerOutput,
        RequestOutput as RequestOutput,
        SchedulerOutput as SchedulerOutput,
    )
    from lmscope.debugger import Debugger as Debugger
    from lmscope.errors import (
        EngineClosedError as EngineClosedError,
        EngineDeadError as EngineDeadError,
        GateClosedError as GateClosedError,
        LmscopeError as LmscopeError,
        NothingToRun as NothingToRun,
        RecordingError as RecordingError,
    )
    from lmscope.frontend.stream import Stream as Stream
    from lmscope.llm import LLM as LLM
    from lmscope.notebook import (
        debug as debug,
        load_ipython_extension as load_ipython_extension,
        unload_ipython_extension as unload_ipython_extension,
        watch as watch,
    )
    from lmscope.sampling_params import (
        RequestOutputKind as RequestOutputKind,
        SamplingParams as SamplingParams,
    )
    from lmscope.scope.recording import (
        Recording as Recording,
        open_recording as open_recording,
        record as record,
    )
    from lmscope.scope.replay import (
        Replay as Replay,
        replay as replay,
    )
    from lmscope.scope.view import EngineView as EngineView

__version__ = "0.1.0.dev0"

_HOMES = {
    "lmscope.boundary": (
        "EngineCoreOutputs",
        "EngineCoreRequest",
        "ModelRunnerOutput",
        "RequestOutput",
        "SchedulerOutput",
    ),
    "lmscope.debugger": ("Debugger",),
    "lmscope.errors": (
        "EngineClosedError",
        "EngineDeadError",
        "GateClosedError",
        "LmscopeError",
        "NothingToRun",
        "RecordingError",
    ),
    "lmscope.frontend.stream": ("Stream",),
    "lmscope.llm": ("LLM",),
    "lmscope.notebook": ("debug", "load_ipython_extension", "unload_ipython_extension", "watch"),
    "lmscope.sampling_params": ("RequestOutputKind", "SamplingParams"),
    "lmscope.scope.recording": ("Recording", "open_recording", "record"),
    "lmscope.scope.replay": ("Replay", "replay"),
    "lmscope.scope.view": ("EngineView",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [*sorted(_HOME_OF), "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'lmscope' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
