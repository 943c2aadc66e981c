"""The sentences, word for word, and one for every code."""

from __future__ import annotations

import pytest

from lmscope.boundary import EngineInfo
from lmscope.decisions import Behind, Code, Decision, Outcome
from lmscope.scope.why import ending, sentence

INFO = EngineInfo(
    model="m",
    block_size=4,
    num_blocks=10,
    max_num_seqs=8,
    max_num_batched_tokens=18,
    max_model_len=48,
)


def scheduled(code, **quantities):
    return Decision("r1", Outcome.SCHEDULED, code, **quantities)


def waiting(code, **quantities):
    return Decision("r1", Outcome.WAITING, code, **quantities)


def preempted(code, **quantities):
    return Decision("r1", Outcome.PREEMPTED, code, **quantities)


@pytest.mark.parametrize(
    ("decision", "computed", "expected"),
    [
        (scheduled(Code.DECODE, tokens_granted=1), 20, "decode: 1 token"),
        (scheduled(Code.DECODE, tokens_granted=4), 20, "decode: 4 tokens"),
        (scheduled(Code.PREFILL, tokens_granted=9), 9, "prefill: 9 tokens"),
        (
            scheduled(Code.PREFILL, tokens_granted=9, tokens_cached=18),
            27,
            "prefill: 9 tokens, 18 came from the cache",
        ),
        (
            scheduled(Code.PREFILL, tokens_granted=1),
            34,
            "prefill: the last 1 of 34 tokens",
        ),
        (
            scheduled(Code.PREFILL_CHUNK, tokens_granted=15, tokens_left=1, budget_left=15),
            33,
            "prefill: 33 of 34 tokens so far; budget ended the chunk",
        ),
        (
            scheduled(
                Code.PREFILL_CHUNK,
                tokens_granted=8,
                tokens_left=10,
                tokens_cached=16,
                budget_left=15,
            ),
            24,
            "prefill: 24 of 34 tokens so far, 16 came from the cache; "
            "long_prefill_token_threshold ended the chunk",
        ),
        (
            scheduled(Code.PREFILL_CHUNK, tokens_granted=15, tokens_left=3, budget_left=15),
            None,
            "prefill: 15 tokens, 3 left; budget ended the chunk",
        ),
        (
            scheduled(Code.RESUMED, tokens_granted=5, tokens_recomputed=4, tokens_cached=16),
            21,
            "resumed: computes 4 tokens again, 16 came from the cache",
        ),
        (
            scheduled(Code.RESUMED, tokens_granted=5, tokens_recomputed=5, tokens_left=7),
            5,
            "resumed: computes 5 tokens again; 7 left",
        ),
        (
            scheduled(Code.RESUMED, tokens_granted=1, tokens_cached=20),
            21,
            "resumed: 1 token, 20 came from the cache",
        ),
        (
            waiting(Code.NO_BLOCKS, blocks_needed=3, blocks_free=1, other_id="r2", other_amount=9),
            0,
            "waiting: needs 3 blocks, 1 free; r2 holds 9",
        ),
        (
            waiting(Code.NO_BLOCKS, blocks_needed=1, blocks_free=0),
            0,
            "waiting: needs 1 block, 0 free",
        ),
        (
            waiting(Code.BUDGET, other_id="r2", other_amount=15),
            0,
            "waiting: token budget 18 spent; r2 took 15",
        ),
        (waiting(Code.SEATS), 0, "waiting: all 8 seats taken"),
        (waiting(Code.SEATS, other_amount=1), 0, "waiting: the one seat is taken"),
        (
            waiting(Code.AFTER_PREEMPTION, other_id="r7"),
            0,
            "waiting: nobody is admitted in a step that preempts (r7)",
        ),
        (
            waiting(Code.CHUNKING_OFF, tokens_wanted=40, budget_left=12),
            0,
            "waiting: needs 40 tokens in one piece, 12 of the budget left",
        ),
        (waiting(Code.LENGTH_LIMIT), 0, "waiting: no room below max_model_len 48"),
        (
            waiting(Code.IN_FLIGHT),
            0,
            "waiting: tokens on their way may already reach max_tokens 12",
        ),
        (
            waiting(Code.AFTER_SELF_PREEMPTION),
            0,
            "waiting: the step ended before its turn, when a request preempted itself",
        ),
        (
            waiting(Code.BEHIND, other_id="r5", other_amount=2),
            0,
            "waiting: behind r5, 2 ahead",
        ),
        (
            preempted(
                Code.PREEMPTED,
                other_id="r8",
                blocks_needed=1,
                blocks_free=0,
                blocks_lost=5,
                tokens_lost=18,
            ),
            0,
            "preempted for r8, which needed 1 block, 0 free; gave up 5 blocks, 18 computed tokens",
        ),
        (
            preempted(
                Code.PREEMPTED_SELF, blocks_needed=1, blocks_free=0, blocks_lost=2, tokens_lost=8
            ),
            0,
            "preempted itself: needed 1 block, 0 free; gave up 2 blocks, 8 computed tokens",
        ),
    ],
)
def test_says(decision, computed, expected):
    said = sentence(decision, info=INFO, num_computed_tokens=computed, max_tokens=12)
    assert said == expected


@pytest.mark.parametrize("code", Code)
@pytest.mark.parametrize("info", [INFO, None])
def test_every_code_has_a_sentence_even_without_quantities(code, info):
    said = sentence(Decision("r1", Outcome.WAITING, code), info=info)

    assert said.split(":")[0] in {
        "decode",
        "prefill",
        "resumed",
        "waiting",
        "preempted itself",
        "preempted for –, which needed 0 blocks, 0 free; gave up 0 blocks, 0 computed tokens",
    }
    assert "None" not in said
    assert "  " not in said


def test_those_behind_are_named_together():
    behind = Behind("r6", "r9", 4, Code.BEHIND, "r5")
    assert sentence(behind) == "waiting: behind r5; r6 to r9, 4 requests"


@pytest.mark.parametrize(
    ("reason", "stop", "tokens", "expected"),
    [
        ("length", None, 12, "finished at step 20: reached max_tokens 12"),
        ("stop", None, 3, "finished at step 20: stop token 2, the end of sequence"),
        ("stop", 80, 3, "finished at step 20: stop token 80"),
        ("stop", "\n\n", 3, 'finished at step 20: stop string "\\n\\n"'),
        ("abort", None, 3, "finished at step 20: aborted"),
        ("error", None, 3, "finished at step 20: error"),
        ("error", "logits are NaN", 3, "finished at step 20: error, logits are NaN"),
    ],
)
def test_says_how_a_request_ended(reason, stop, tokens, expected):
    said = ending(
        20,
        reason,
        stop,
        num_output_tokens=tokens,
        num_tokens=tokens + 5,
        max_tokens=12,
        max_model_len=48,
        eos_token_id=2,
    )
    assert said == expected


def test_says_which_limit_a_request_reached():
    def said(num_tokens):
        return ending(
            20, "length", None, num_output_tokens=9, num_tokens=num_tokens, max_tokens=12,
            max_model_len=48,
        )  # fmt: skip

    assert said(48) == "finished at step 20: reached max_model_len 48"
    assert said(30) == "finished at step 20: the pool has no room for another token"
