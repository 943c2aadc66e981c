"""Provenance equals brute force: on many random lives of an engine, asked then and later."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from lmscope.decisions import Miss
from lmscope.scope.recording import record

sys.path.insert(0, str(Path(__file__).parent))
from provenance_oracle import LETTERS, Lab

NUM_REQUESTS = 40


def assert_equal(provenance, admissions, size):
    """All that an answer says, against what the oracle saw."""
    assert [a.kind for a in provenance.admissions] == [a.kind for a in admissions]
    for told, seen in zip(provenance.admissions, admissions, strict=True):
        assert (told.step, told.num_tokens) == (seen.step, seen.num_tokens)
        cached = [part for part in told.ranges if part.source == "cache"]
        assert [(p.block_id, p.stored_by, p.stored_step) for p in cached] == seen.hits
        assert [(p.start, p.end) for p in cached] == [
            (index * size, (index + 1) * size) for index in range(len(seen.hits))
        ]
        computed = [part for part in told.ranges if part.source == "computed"]
        assert [(p.start, p.end, p.step) for p in computed] == seen.chunks
        end = seen.chunks[-1][1]
        rest = [(p.start, p.end) for p in told.ranges if p.source == "not_computed"]
        assert rest == ([(end, seen.num_tokens)] if end < seen.num_tokens else [])
        assert_same_miss(told.miss, seen, size)


def assert_same_miss(miss, seen, size):
    assert miss.position == len(seen.hits) * size
    assert (
        str(miss.code),
        miss.block_id,
        miss.stored_by,
        miss.stored_step,
        miss.removed_step,
        miss.other_id,
        miss.detail,
    ) == seen.miss
    assert miss.since_step == 0
    match = miss.match
    if miss.code is not Miss.NEVER_SEEN or seen.match is None:
        assert match is None
        return
    there = match.request_id, match.num_tokens, match.token_id, match.other_token_id
    assert (*there, match.is_other_salt) == seen.match
    assert match.is_uncomputed == (match.num_tokens >= miss.position + size)
    assert match.text == ("" if match.token_id is None else LETTERS[match.token_id])
    other = match.other_token_id
    assert match.other_text == ("" if other is None else LETTERS[other])


def live_and_compare(seed):
    """One random life of 40 requests; returns why first admissions and later ones missed."""
    lab = Lab(seed)
    size = lab.info.block_size
    with record(lab) as recording:
        for part in range(1, 5):
            lab.live(NUM_REQUESTS * part // 4, is_over=part == 4)
            # While it grows, and from where the last question left off.
            for request_id, admissions in lab.oracle.admissions.items():
                assert_equal(recording.provenance(request_id), admissions, size)
    return Counter(
        (admission.kind, admission.miss[0])
        for admissions in lab.oracle.admissions.values()
        for admission in admissions
    )


def test_it_equals_brute_force():
    seen = sum((live_and_compare(seed) for seed in range(25)), Counter())

    # The lives are worth looking at: every reason occurs, at first and on coming back.
    reasons = {str(reason) for reason in Miss} - {"unknown"}
    assert {reason for kind, reason in seen if kind == "new"} == reasons
    assert {reason for kind, reason in seen if kind == "resumed"} == reasons


@pytest.mark.slow
def test_it_equals_brute_force_on_ten_thousand_requests():
    num_requests, seed = 0, 100
    while num_requests < 10_000:
        seen = live_and_compare(seed)
        num_requests += sum(n for (kind, _), n in seen.items() if kind == "new")
        seed += 1


@pytest.mark.parametrize("seed", range(20))
def test_a_recording_that_began_late_says_the_same_or_that_it_does_not_know(seed):
    lab = Lab(seed)
    with record(lab) as whole:
        lab.live(NUM_REQUESTS // 2, is_over=False)
        with record(lab) as late:
            lab.live(NUM_REQUESTS)
    since = late.snapshot.step + 1
    for request_id in late.at().requests:
        known = {a.step: a for a in whole.provenance(request_id).admissions}
        for told in late.provenance(request_id).admissions:
            if told.step is None:
                continue
            truth = known[told.step]
            # All but the text of output tokens from before, which nobody told.
            assert [replace(part, text="") for part in told.ranges] == [
                replace(part, text="") for part in truth.ranges
            ]
            assert_consistent(told.miss, truth.miss, since)


def assert_consistent(told, truth, since):
    """What a late recording says is true as far as it goes, and it says how far that is."""
    if told.code in (Miss.UNKNOWN, Miss.NEVER_SEEN, Miss.OTHER_SALT):
        assert told.since_step == since
        if told.code is Miss.UNKNOWN:
            return
        if truth.code is Miss.OTHER_SALT:
            same = replace(truth, since_step=since)
            assert told == same or (told.code is Miss.NEVER_SEEN and truth.stored_step < since)
        else:
            assert truth.code is told.code or 0 < truth.removed_step < since
    else:
        assert told == truth
