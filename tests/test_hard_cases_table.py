"""docs/hard_cases.md says where each hard case is tested; this checks that it is so."""

from __future__ import annotations

import ast
import fnmatch
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTIONS = {
    "D": 7, "S": 10, "L": 7, "P": 11, "I": 8, "A": 7, "K": 10, "C": 9,
    "Q": 6, "G": 8, "V": 3, "M": 4, "T": 3, "W": 6, "N": 8, "U": 9,
}  # fmt: skip
CASES = [f"{letter}{n}" for letter, count in SECTIONS.items() for n in range(1, count + 1)]


def read_rows() -> list[tuple[str, str]]:
    """Each case with what stands in the last column of its row."""
    rows = []
    for line in (ROOT / "docs/hard_cases.md").read_text().splitlines():
        match = re.fullmatch(r"\| ([A-Z]\d+) \| .+ \| (.+) \|", line)
        if match:
            rows.append((match[1], match[2]))
    return rows


ROWS = read_rows()


@cache
def names_in(path: str) -> list[str]:
    """Names of the tests in a file; of Python's also classes and what is assigned."""
    source = (ROOT / path).read_text()
    if path.endswith(".js"):
        return re.findall(r'^test\("([^"]+)"', source, re.MULTILINE)
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names


def test_each_case_is_listed_once_and_in_order():
    assert [case for case, _ in ROWS] == CASES


@pytest.mark.parametrize(("case", "where"), ROWS, ids=[case for case, _ in ROWS])
def test_a_case_is_tested_where_the_table_says_or_waits_for_something(case: str, where: str):
    named = re.findall(r"`([^`]+)::([^`]+)`", where)
    for path, pattern in named:
        assert (ROOT / path).is_file(), f"{case}: there is no file {path}"
        matching = fnmatch.filter(names_in(path), pattern)
        assert matching, f"{case}: {path} has no test {pattern}"
    if not named:
        assert where.startswith("waits for: "), f"{case} is neither tested nor waiting"
        found = [
            f"{path.relative_to(ROOT)}::{name}"
            for path in (ROOT / "tests").rglob("test_*.py")
            for name in names_in(str(path.relative_to(ROOT)))
            if name.startswith(f"test_{case.lower()}_")
        ]
        assert not found, f"{case} waits for nothing any more: {found}"
