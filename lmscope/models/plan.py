"""ExecutionPlan: what an engine runs in a step, and why; `print(llm.plan)` shows it."""

from __future__ import annotations

import msgspec

__all__ = ["ExecutionPlan", "PlanLine", "scripted_plan"]

_WIDTH = 10


class PlanLine(msgspec.Struct, frozen=True):
    """One choice. why: what decided it; "" where there was nothing to decide."""

    what: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what


class ExecutionPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, choice by choice.

    body         the lean forward, or the module of transformers
    linears      how the matrices of the layers are multiplied
    head         the same for the matrix that gives the logits
    attention    how the paged cache is read
    threads      torch threads of the engine
    dtype        of the weights as loaded, of activations, and of keys and values
    memory       what of the weights is kept
    device       where all of this runs
    scheduling   when a step is scheduled
    """

    body: PlanLine
    linears: PlanLine
    head: PlanLine
    attention: PlanLine
    threads: PlanLine
    dtype: PlanLine
    memory: PlanLine
    # What the engine knows and no model does.
    device: PlanLine = PlanLine("none")
    scheduling: PlanLine = PlanLine("none")

    def __str__(self) -> str:
        return "\n".join(
            f"{name:<{_WIDTH}} {getattr(self, name)}" for name in self.__struct_fields__
        )


def scripted_plan(threads: PlanLine) -> ExecutionPlan:
    """That of an engine without a model."""
    nothing = PlanLine("none", "a script says what is sampled")
    return ExecutionPlan(
        body=nothing,
        linears=nothing,
        head=nothing,
        attention=nothing,
        threads=threads,
        dtype=nothing,
        memory=nothing,
        device=nothing,
    )
