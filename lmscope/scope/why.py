"""Sentences: what a decision says to a person.

Every view takes its words from here, so that one thing has one wording. Present tense,
numbers before judgement, one clause and at most one more after a semicolon.
"""

from __future__ import annotations

import json

from lmscope.boundary import EngineInfo
from lmscope.decisions import Behind, Code, Decision, Miss, Outcome, PrefixMiss, PromptMatch
from lmscope.scope.visible import quoted

__all__ = ["NOT_DECIDED", "ending", "missed", "sentence"]

NOT_DECIDED = "waiting: arrived after the last step was scheduled"


def sentence(
    decision: Decision | Behind,
    *,
    info: EngineInfo | None = None,
    num_computed_tokens: int | None = None,
    max_tokens: int | None = None,
) -> str:
    """Why a request ran, waited or was preempted in a step.

    info                  names the limits that it ran into
    num_computed_tokens   of the request after the step; makes "33 of 34 tokens so far"
    max_tokens            of the request
    """
    if isinstance(decision, Behind):
        one = Decision(decision.first, Outcome.WAITING, decision.code, other_id=decision.other_id)
        text = _waiting(one, info, max_tokens)
        return f"{text}; {decision.first} to {decision.last}, {_count(decision.count, 'request')}"
    if decision.code in _SCHEDULED:
        return _scheduled(decision, num_computed_tokens)
    if decision.code in _PREEMPTED:
        return _preempted(decision)
    return _waiting(decision, info, max_tokens)


def ending(
    step: int | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
    *,
    num_output_tokens: int,
    num_tokens: int,
    max_tokens: int | None = None,
    max_model_len: int | None = None,
    eos_token_id: int | None = None,
) -> str:
    """How a request ended; `num_tokens` counts prompt and output."""
    if finish_reason == "length":
        if max_tokens is not None and num_output_tokens >= max_tokens:
            how = f"reached max_tokens {max_tokens}"
        elif max_model_len is not None and num_tokens >= max_model_len:
            how = f"reached max_model_len {max_model_len}"
        else:
            how = "the pool has no room for another token"
    elif finish_reason == "stop":
        if isinstance(stop_reason, str):
            how = f"stop string {json.dumps(stop_reason, ensure_ascii=False)}"
        elif stop_reason is not None:
            how = f"stop token {stop_reason}"
        elif eos_token_id is not None:
            how = f"stop token {eos_token_id}, the end of sequence"
        else:
            how = "end of sequence"
    elif finish_reason == "error":
        how = "error" if stop_reason is None else f"error, {stop_reason}"
    elif finish_reason == "abort":
        how = "aborted"
    else:
        how = finish_reason or "–"
    return f"finished at step {'–' if step is None else step}: {how}"


def missed(miss: PrefixMiss) -> str:
    """Why the prefix cache did not have the rest of a request's tokens."""
    was = "" if miss.stored_by is None else f"{miss.stored_by} had filled it at {miss.stored_step}"
    match miss.code:
        case Miss.NEVER_SEEN:
            since = f" since step {miss.since_step}" if miss.since_step else ""
            why = f"never seen{since}; {_parting(miss.match)}"
        case Miss.TAIL_RECOMPUTE:
            why = "last token is always computed"
        case Miss.SHORTER_THAN_BLOCK:
            why = "shorter than a block"
        case Miss.EVICTED:
            taker = "" if miss.other_id is None else f" for {miss.other_id}"
            verb = "evicted" if taker else "dropped"
            why = f"{verb} at {miss.removed_step}{taker}" + (f"; {was}" if was else "")
        case Miss.CLEARED:
            why = f"cache reset at {miss.removed_step}" + (f"; {was}" if was else "")
        case Miss.OTHER_SALT:
            since = f", never its own since step {miss.since_step}" if miss.since_step else ""
            why = f"other salt{since}" + (f"; {was}" if was else "")
        case Miss.LOOKUP_SKIPPED:
            why = f"not looked up; {_SKIPPED.get(miss.detail, miss.detail)}"
        case _ if miss.block_id is not None:
            gone = f"lost at {miss.removed_step}" if miss.removed_step else "not looked up"
            why = (
                f"never seen, or {gone}; what came before the same tokens in block "
                f"{miss.block_id} is not in the recording"
            )
        case _:
            why = f"decided before step {miss.since_step}, where the recording begins"
    return f"missed from token {miss.position}: {why}"


def _parting(match: PromptMatch | None) -> str:
    """How far an earlier prompt is the same, and what comes then on both sides."""
    if match is None:
        return "no earlier prompt begins with the same token"
    salt = ", under another salt" if match.is_other_salt else ""
    same = f"{match.request_id} has the same first {_count(match.num_tokens, 'token')}{salt}"
    if match.is_uncomputed or match.token_id is None:
        return f"{same}, and had not computed them all"
    here = _token(match.token_id, match.text)
    if match.other_token_id is None:
        return f"{same} and ends there, where this one has {here}"
    return (
        f"{same}, then {_token(match.other_token_id, match.other_text)} where this one has {here}"
    )


def _token(token_id: int, text: str) -> str:
    if not text:  # a part of a character, or nobody told
        return f"token {token_id}"
    return quoted(text)


def _scheduled(decision: Decision, num_computed_tokens: int | None) -> str:
    granted, left = decision.tokens_granted, decision.tokens_left
    cached = f", {decision.tokens_cached} came from the cache" if decision.tokens_cached else ""
    if decision.code is Code.DECODE:
        return f"decode: {_count(granted, 'token')}"
    if decision.code is Code.RESUMED:
        again = decision.tokens_recomputed
        what = f"computes {_count(again, 'token')} again" if again else _count(granted, "token")
        return f"resumed: {what}{cached}" + (f"; {left} left" if left else "")
    if decision.code is Code.PREFILL_CHUNK:
        who = "budget" if granted >= decision.budget_left else "long_prefill_token_threshold"
        if num_computed_tokens is None:
            so_far = f"{_count(granted, 'token')}, {left} left"
        else:
            so_far = f"{num_computed_tokens} of {num_computed_tokens + left} tokens so far"
        return f"prefill: {so_far}{cached}; {who} ended the chunk"
    if num_computed_tokens is not None and granted + decision.tokens_cached < num_computed_tokens:
        return f"prefill: the last {granted} of {num_computed_tokens} tokens"
    return f"prefill: {_count(granted, 'token')}{cached}"


def _waiting(decision: Decision, info: EngineInfo | None, max_tokens: int | None) -> str:
    other, amount = decision.other_id, decision.other_amount
    match decision.code:
        case Code.NO_BLOCKS:
            holder = f"; {other} holds {amount}" if other is not None else ""
            needs = _count(decision.blocks_needed, "block")
            why = f"needs {needs}, {decision.blocks_free} free{holder}"
        case Code.BUDGET:
            budget = "" if info is None else f" {info.max_num_batched_tokens}"
            taker = f"; {other} took {amount}" if other is not None and amount else ""
            why = f"token budget{budget} spent{taker}"
        case Code.SEATS:
            seats = amount or (0 if info is None else info.max_num_seqs)
            all_seats = f"all {seats} seats" if seats else "all seats"
            why = "the one seat is taken" if seats == 1 else f"{all_seats} taken"
        case Code.AFTER_PREEMPTION:
            who = "" if other is None else f" ({other})"
            why = f"nobody is admitted in a step that preempts{who}"
        case Code.CHUNKING_OFF:
            wanted = _count(decision.tokens_wanted, "token")
            why = f"needs {wanted} in one piece, {decision.budget_left} of the budget left"
        case Code.LENGTH_LIMIT:
            limit = "" if info is None else f" {info.max_model_len}"
            why = f"no room below max_model_len{limit}"
        case Code.IN_FLIGHT:
            limit = "" if max_tokens is None else f" {max_tokens}"
            why = f"tokens on their way may already reach max_tokens{limit}"
        case Code.AFTER_SELF_PREEMPTION:
            why = "the step ended before its turn, when a request preempted itself"
        case _:
            ahead = f", {amount} ahead" if amount else ""
            why = f"behind {'–' if other is None else other}{ahead}"
    return f"waiting: {why}"


def _preempted(decision: Decision) -> str:
    needed = _count(decision.blocks_needed, "block")
    lost = (
        f"gave up {_count(decision.blocks_lost, 'block')}, "
        f"{_count(decision.tokens_lost, 'computed token')}"
    )
    if decision.code is Code.PREEMPTED_SELF:
        return f"preempted itself: needed {needed}, {decision.blocks_free} free; {lost}"
    other = "–" if decision.other_id is None else decision.other_id
    return f"preempted for {other}, which needed {needed}, {decision.blocks_free} free; {lost}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_SCHEDULED = frozenset({Code.DECODE, Code.PREFILL, Code.PREFILL_CHUNK, Code.RESUMED})
_PREEMPTED = frozenset({Code.PREEMPTED, Code.PREEMPTED_SELF})
_SKIPPED = {
    "caching is off": "prefix caching is off",
    "prompt_logprobs": "prompt_logprobs needs every prompt token computed",
    "skip_reading_prefix_cache": "skip_reading_prefix_cache is set",
}
