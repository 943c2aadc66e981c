"""Why: the reason for what a step did with a request, back to the first cause, and the way out.

`llm.why(request_id)` asks a live engine, `recording.why(request_id, step=)` a recording. The
answer is data; printed it is two or three sentences, in a notebook a table.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from lmscope.boundary import SchedulerOutput
from lmscope.decisions import Change, Code, Decision, Outcome

# The one scheduler, and not a model of it. It imports no torch and nothing of this package.
from lmscope.engine.what_if import WhatIf, restore_scheduler
from lmscope.errors import RecordingError
from lmscope.scope.why import sentence

if TYPE_CHECKING:
    from lmscope.engine.scheduler import Scheduler
    from lmscope.scope.recording import Recording

__all__ = ["Link", "Why", "scheduler_before", "why_in_recording", "why_now"]

# A chain of causes is as long as the queue at most; nobody reads more of it than this.
_LONGEST_CHAIN = 8


class Link(msgspec.Struct, frozen=True, gc=False):
    """One cause in a chain: what a step said of one request."""

    request_id: str
    step: int
    sentence: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to: why did this request run, wait or lose its place in this step?

    decision       what the scheduler said; None for a request that it has not seen yet or
                   that has ended
    chain          the causes, nearest first: this request, what it waited for, and so on
    would_run_if   the smallest single change under which it would have run (on a live
                   engine: would run next); no change at all if it runs; None if there is no
                   such change, or nothing to change
    limits         where no single change is enough: two that bind together, of "blocks",
                   "tokens", "seats" and "position"
    """

    request_id: str
    step: int
    decision: Decision | None
    chain: tuple[Link, ...]
    would_run_if: Change | None = None
    limits: tuple[str, str] | None = None
    is_live: bool = False

    def __str__(self) -> str:
        return " ".join(self.sentences)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The answer in two or three sentences."""
        if not self.chain:
            return (f"Request {self.request_id} was not in step {self.step}.",)
        first, *rest = self.chain
        told = [f"Step {first.step}, request {first.request_id}: {first.sentence}."]
        if rest:
            last = rest[-1]
            at = "" if last.step == first.step else f"step {last.step}, "
            told.append(f"The first cause: {at}{last.request_id}: {last.sentence}.")
        told.append(self._way_out())
        return tuple(sentence for sentence in told if sentence)

    def _repr_html_(self) -> str:
        """A plain table; text is escaped, since ids are the user's."""
        rows = [(str(link.step), link.request_id, link.sentence) for link in self.chain]
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        way_out = html.escape(self._way_out())
        return (
            "<table><thead><tr><th>step</th><th>request</th><th>why</th></tr></thead>"
            f"<tbody>{body}</tbody></table><p>{way_out}</p>"
        )

    def _way_out(self) -> str:
        if self.decision is None or self.decision.outcome is Outcome.SCHEDULED:
            return ""
        would = "It would run" if self.is_live else "It would have run"
        change = self.would_run_if
        if change is None:
            if self.limits is None:
                return "No single change is enough."
            one, other = (_LIMIT_WORDS[name] for name in self.limits)
            return f"No single change is enough: {one} and {other} bind together."
        if change.blocks:
            return f"{would} with {_more(change.blocks, 'free block')}."
        if change.tokens:
            return f"{would} with {_more(change.tokens, 'token')} of budget."
        if change.seats:
            return f"{would} with max_num_seqs larger by {change.seats}."
        if change.position:
            place = "at the head" if change.position == 1 else f"at place {change.position}"
            return f"{would} {place} of the queue."
        return "It runs in the next step."


_LIMIT_WORDS = {
    "blocks": "free blocks",
    "tokens": "the token budget",
    "seats": "max_num_seqs",
    "position": "its place in the queue",
}


def why_in_recording(recording: Recording, request_id: str, step: int | None = None) -> Why:
    """The answer for one step of a recording; without a step: the last one it was live in.

    RecordingError for a step or a request that is not there, naming those that are.
    """
    view = recording.at(step)
    if request_id not in view.requests:
        known = ", ".join(list(view.requests)[:8]) or "none"
        raise RecordingError(
            f"request id is {request_id!r}, which is not known at step {view.step}; known: {known}"
        )
    finish_step = view.requests[request_id].finish_step
    if step is None and finish_step is not None:
        view = recording.at(finish_step)
    decision = view.decision(request_id)
    if decision is None:
        link = Link(request_id, view.step, view.why(request_id))
        return Why(request_id=request_id, step=view.step, decision=None, chain=(link,))

    def tell(name: str, at: int) -> _Told | None:
        then = view if at == view.step else recording.at(at)
        told = then.decision(name)
        if told is None:
            return None
        # One that ended in this step is a cause by what it did before that.
        has_ended = then.requests[name].finish_step is not None
        words = sentence(told, info=then.info) if has_ended else then.why(name)
        return _Told(name, at, told, words)

    chain = _chain(
        _Told(request_id, view.step, decision, view.why(request_id)),
        tell,
        lambda name: _last_preemption(recording, name, view.step),
    )
    change, limits = None, None
    if decision.outcome is not Outcome.SCHEDULED:
        scheduler = scheduler_before(recording, view.step)
        if scheduler is not None and request_id in scheduler.requests:
            change, limits = _way_out(WhatIf(scheduler), request_id)
    return Why(
        request_id=request_id,
        step=view.step,
        decision=decision,
        chain=chain,
        would_run_if=change,
        limits=limits,
    )


def why_now(scheduler: Scheduler, request_id: str, step: int) -> Why | None:
    """The answer for a live request, now: why it waits and what the next step would need.

    step   the last one. None when the scheduler does not know the request. The scheduler is
           only read; it must stand between two steps.
    """
    request = scheduler.requests.get(request_id)
    if request is None:
        return None
    what_if = WhatIf(scheduler)
    # A waiting request may not have been examined for many steps, so the next one is asked.
    coming = _expanded(what_if.decide(), scheduler)

    def tell(name: str, at: int) -> _Told | None:
        live = scheduler.requests.get(name)
        if live is None:
            return None
        told = coming.get(name)
        if live.decision is not None and (
            told is None or told.outcome is Outcome.SCHEDULED or live in scheduler.running
        ):
            told = live.decision
        if told is None:
            return None
        words = sentence(told, max_tokens=live.sampling_params.max_tokens)
        return _Told(name, step, told, words)

    first = tell(request_id, step)
    if first is None:
        return None
    change, limits = _way_out(what_if, request_id)
    return Why(
        request_id=request_id,
        step=step,
        decision=first.decision,
        chain=_chain(first, tell, lambda name: None),
        would_run_if=change,
        limits=limits,
        is_live=True,
    )


def scheduler_before(recording: Recording, step: int) -> Scheduler | None:
    """The scheduler as it stood right before it scheduled a step; None if that was not recorded.

    Its schedule() decides what the recording says was decided.
    """
    for boundary in recording.structs_of(step):
        if isinstance(boundary, SchedulerOutput):
            # What was aborted since the step before is reported with this one.
            before = recording.at(step - 1).snapshot()
            return restore_scheduler(before, ended=boundary.finished_req_ids)
    return None


class _Told(NamedTuple):
    """What one step said of one request, and its sentence."""

    request_id: str
    step: int
    decision: Decision
    words: str

    @property
    def link(self) -> Link:
        return Link(self.request_id, self.step, self.words)


def _chain(
    first: _Told,
    tell: Callable[[str, int], _Told | None],
    last_preemption: Callable[[str], _Told | None],
) -> tuple[Link, ...]:
    """From a decision to the one behind it, until somebody runs or nobody is named."""
    links = [first.link]
    seen = {first.request_id}
    last = first
    while last.decision.outcome is not Outcome.SCHEDULED and len(links) < _LONGEST_CHAIN:
        other = last.decision.other_id
        following = None if other is None or other in seen else tell(other, last.step)
        if following is None and last is first and first.decision.outcome is Outcome.WAITING:
            # It waits for nobody in particular; perhaps it had been pushed out before.
            following = last_preemption(first.request_id)
        if following is None:
            break
        seen.add(following.request_id)
        links.append(following.link)
        last = following
    return tuple(links)


def _last_preemption(recording: Recording, request_id: str, step: int) -> _Told | None:
    """The last time a request was preempted, up to a step."""
    found = None
    for boundary in recording.boundaries:
        if boundary.step > step:
            break
        if isinstance(boundary, SchedulerOutput) and request_id in boundary.preempted_req_ids:
            for decision in boundary.decisions:
                if decision.request_id == request_id:
                    found = _Told(request_id, boundary.step, decision, sentence(decision))
    return found


def _way_out(what_if: WhatIf, request_id: str) -> tuple[Change | None, tuple[str, str] | None]:
    change = what_if.least_change(request_id)
    if change is not None:
        return change, None
    return None, what_if.binding_limits(request_id)


def _expanded(output: SchedulerOutput, scheduler: Scheduler) -> dict[str, Decision]:
    """One decision per live request: those given, and the rest of the queue."""
    decisions = {d.request_id: d for d in output.decisions}
    behind = output.behind
    if behind is not None:
        for ahead, request in enumerate(scheduler.waiting):
            if request.request_id not in decisions:
                decisions[request.request_id] = Decision(
                    request.request_id,
                    Outcome.WAITING,
                    behind.code,
                    other_id=behind.other_id,
                    other_amount=ahead if behind.code is Code.BEHIND else 0,
                )
    return decisions


def _more(count: int, noun: str) -> str:
    return f"{count} more {noun}{'' if count == 1 else 's'}"
