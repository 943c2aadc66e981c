"""What an install gives, what an import costs, and what must not be in the repository."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lmscope

ROOT = Path(__file__).parents[1]
PACKAGES = ("lmscope", "widgets/lmscope_widgets", "kernels/lmscope_kernels")


def run_python(code: str, *arguments: str | Path) -> str:
    """What `code` prints in a process of its own, away from the repository's root."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=Path(sys.executable).parent,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def tracked_files() -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


# --- packages ---


@pytest.mark.parametrize("folder", ["widgets", "kernels", "tests", "tutorials"])
def test_folders_that_hold_packages_are_no_packages(folder: str):
    # With one in kernels/, transformers would take it for the `kernels` library.
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_ships_its_types(package: str):
    assert (ROOT / package / "py.typed").is_file()


def test_the_installed_version_is_the_one_in_the_source():
    assert importlib.metadata.version("lmscope") == lmscope.__version__


def test_constraints_pin_every_direct_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["lab"]]
    wanted += project["optional-dependencies"]["dev"]
    names = {re.split(r"[<>=;\[ ]", line)[0].lower().replace("_", "-") for line in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}

    assert names <= pinned


def test_imports_follow_the_contracts():
    result = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


# --- public names ---


def test_no_public_name_is_that_of_a_submodule():
    # Importing lmscope.attach.x would replace a function lmscope.attach by the package.
    submodules = {path.stem for path in (ROOT / "lmscope").iterdir()}
    assert submodules.isdisjoint(lmscope.__all__)


def test_public_names_are_the_same_after_every_submodule_is_imported():
    changed = run_python("""
import importlib, pkgutil
import lmscope

before = {name: getattr(lmscope, name) for name in lmscope.__all__}
for module in pkgutil.walk_packages(lmscope.__path__, "lmscope."):
    importlib.import_module(module.name)
print([name for name, value in before.items() if getattr(lmscope, name) is not value])
""")
    assert changed.strip() == "[]"


# --- what an import costs ---


def modules_after(code: str, *arguments: str | Path) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `code`."""
    ending = "\nimport json, sys; print(json.dumps(list(sys.modules)))"
    return set(json.loads(run_python(code + ending, *arguments).splitlines()[-1]))


def test_importing_lmscope_loads_no_heavy_library():
    loaded = modules_after("import lmscope")
    assert loaded.isdisjoint(
        {"torch", "transformers", "pandas", "plotly", "ipywidgets", "IPython", "lmscope_widgets"}
    )


def test_importing_lmscope_loads_fewer_modules_than_importing_pandas():
    assert len(modules_after("import lmscope")) < len(modules_after("import pandas"))


RECORD = """
import sys
import lmscope
from lmscope.boundary import EngineCoreRequest, EngineInfo, SchedulerOutput
from lmscope.sampling_params import SamplingParams
from lmscope.tap import Tap


class Engine:
    tap = Tap(EngineInfo("scripted", 2, 8, 4, 16, 14))


with lmscope.record(Engine()) as recording:
    Engine.tap(EngineCoreRequest(
        request_id="0", prompt_token_ids=(1, 2, 3), sampling_params=SamplingParams()
    ))
    Engine.tap(SchedulerOutput(step=1))
recording.save(sys.argv[1])
"""


def test_reading_a_recording_imports_no_torch(tmp_path: Path):
    path = tmp_path / "run.lmscope"
    run_python(RECORD, path)

    loaded = modules_after(
        """
import sys
import lmscope

recording = lmscope.open_recording(sys.argv[1])
assert recording.at(step=1).step == 1
assert len(recording.frames.steps) == 1
recording.to_html(sys.argv[2])
""",
        path,
        tmp_path / "run.html",
    )

    assert "lmscope.scope.recording" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "lmscope.engine", "lmscope.llm"})


# --- what must not be in the repository ---


def test_no_tracked_file_names_this_machine_or_a_download_host():
    # Written in parts, or this file would be the first to be found.
    places = [f"{ROOT}/", f"{Path.home()}/", "registry.npm" + "js.org", "files.python" + "hosted"]
    places += [os.environ[name] for name in ("PIP_INDEX_URL", "UV_INDEX_URL") if name in os.environ]
    found = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in tracked_files()
        for place in places
        if place.encode() in path.read_bytes()
    ]
    assert not found


def test_notebooks_are_committed_without_outputs():
    notebooks = [path for path in tracked_files() if path.suffix == ".ipynb"]
    dirty = [
        path.name
        for path in notebooks
        for cell in json.loads(path.read_text())["cells"]
        if cell.get("outputs") or cell.get("execution_count")
    ]
    assert not dirty
