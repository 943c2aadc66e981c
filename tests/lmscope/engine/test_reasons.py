"""Every way out of schedule() names its reason: read from the syntax tree, so that a new
exit cannot come without one."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise

import pytest

from lmscope.decisions import Code
from lmscope.engine import scheduler, step
from lmscope.engine.scheduler import Scheduler

DECIDING = ("schedule", "_schedule_running", "_allocate_or_preempt", "_schedule_waiting")
SUCCESS = "return (blocks, index)"  # the blocks are there: the caller writes the decision


def exits_without_code(source: str) -> list[str]:
    """`break`, `continue` and early `return` in blocks that name no Code before them."""
    function = ast.parse(textwrap.dedent(source)).body[0]
    found = []

    def visit(block: list[ast.stmt], is_function_body: bool) -> None:
        for position, statement in enumerate(block):
            is_exit = isinstance(statement, (ast.Break, ast.Continue, ast.Return))
            is_end = is_function_body and position == len(block) - 1
            if is_exit and not is_end and ast.unparse(statement) != SUCCESS:
                before = block[:position]
                names = {
                    node.attr
                    for earlier in before
                    for node in ast.walk(earlier)
                    if isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and node.value.id == "Code"
                }
                decides = any(_decides(earlier) for earlier in before)
                if not (names and decides) and not _follows_a_decision(statement, function):
                    found.append(f"line {statement.lineno}: {ast.unparse(statement)}")
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list):
                    visit(inner, is_function_body=False)

    visit(function.body, is_function_body=True)
    return found


def _decides(statement: ast.stmt) -> bool:
    """Whether a statement writes a decision down."""
    calls = [n.func for n in ast.walk(statement) if isinstance(n, ast.Call)]
    return any(
        isinstance(call, ast.Attribute)
        and call.attr in ("decide", "_refuse_rest", "_refuse_head", "_keep_waiting")
        for call in calls
    )


def _follows_a_decision(exit_: ast.stmt, function: ast.AST) -> bool:
    """`if victim is request: return` right behind the decision about the victim."""
    for node in ast.walk(function):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, statement in pairwise(body):
            is_plain = isinstance(before, ast.Expr) and _decides(before)
            if is_plain and isinstance(statement, ast.If) and statement.body == [exit_]:
                return True
    return False


@pytest.mark.parametrize("name", DECIDING)
def test_every_exit_names_its_reason(name):
    assert exits_without_code(inspect.getsource(getattr(Scheduler, name))) == []


def test_an_exit_without_a_reason_would_be_found():
    source = """
    def f(self, step):
        while True:
            if a:
                step.decide(Decision(x, Outcome.WAITING, Code.BUDGET), r)
                continue
            if b:
                continue
            if c:
                self._refuse_head(step, r, Code.SEATS)
                return
            if d:
                break
        return step
    """
    assert exits_without_code(source) == ["line 8: continue", "line 13: break"]


def test_every_code_is_given_somewhere():
    source = inspect.getsource(scheduler) + inspect.getsource(step)
    assert [code.name for code in Code if f"Code.{code.name}" not in source] == []
