"""What the README says can be done, is done here."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from lmscope import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)
# A line that says in a comment what its expression gives.
WITH_VALUE = re.compile(r"^(?P<expression>\S.*?)\s+# (?P<value>'.*')$")


def cell_of(source: str) -> nbformat.NotebookNode:
    """A cell that runs a block, and fails where a value in a comment is another."""
    lines = []
    for line in source.splitlines():
        lines.append(line)
        said = WITH_VALUE.match(line)
        if said is not None:
            value = f"_value = {said['expression']}"
            lines += [value, f"assert _value == {said['value']}, _value"]
    return nbformat.v4.new_code_cell("\n".join(lines))


def test_a_value_in_a_comment_is_checked():
    assert "assert _value == 'b', _value" in cell_of("a = 'b'\na    # 'b'").source
    assert cell_of("a = 1  # it's one\n").source == "a = 1  # it's one"


@pytest.mark.slow
def test_the_blocks_run_in_their_order_as_cells_of_a_notebook(
    demo_model: Path, run_notebook: Callable[[nbformat.NotebookNode], nbformat.NotebookNode]
):
    blocks = [b["source"] for b in BLOCK.finditer(README) if b["language"] in ("python", "ipython")]
    assert len(blocks) >= 6
    assert sum(bool(WITH_VALUE.match(line)) for b in blocks for line in b.splitlines()) >= 2

    done = run_notebook(nbformat.v4.new_notebook(cells=[cell_of(block) for block in blocks]))

    outputs = [output for cell in done.cells for output in cell.outputs]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


def test_links_lead_to_files_of_the_repository():
    links = re.findall(r"\]\(([^)#\s]+)", README) + re.findall(r"<img[^>]+src=\"([^\"]+)\"", README)
    assert links
    assert not [link for link in links if "://" in link or not (ROOT / link).exists()]


def test_make_has_every_target_that_is_named():
    named = set(re.findall(r"`make (\w+)", README))
    assert {"demo", "test", "lab"} <= named
    for target in named:
        found = subprocess.run(
            ["make", "--dry-run", "--question", target], cwd=ROOT, capture_output=True, check=False
        )
        assert found.returncode < 2, found.stderr.decode()


def test_the_last_line_of_the_demo_is_the_one_that_is_quoted():
    (line,) = re.findall(r"with the line `` (.+?) ``", README)
    assert f'print("{line}")' in Path(cli.__file__).read_text()


def test_sub_commands_are_those_of_the_command_line():
    named = set(re.findall(r"\.venv/bin/lmscope (\w+)", README))
    assert named
    for name in named:
        found = subprocess.run(
            [sys.executable, "-m", "lmscope.cli", name, "--help"], capture_output=True, check=False
        )
        assert found.returncode == 0, found.stderr.decode()


def test_scripts_and_tests_that_are_named_are_there():
    for path in re.findall(r"\.venv/bin/python (?:-m pytest )?([\w/]+(?:\.py)?)", README):
        assert (ROOT / path).exists(), path
