"""Provenance: each reason for a miss, in data and in words; no torch."""

from __future__ import annotations

import pytest

from lmscope import LLM, RecordingError, SamplingParams, open_recording, record
from lmscope.decisions import Miss, PromptMatch

DEADLINE_S = 200
SHORT = SamplingParams(max_tokens=2)


def script(request_id, position):
    return ord("A") + position % 26


def make_llm(**options):
    settings = {"execute": "scripted", "script": script, "block_size": 4, "num_kv_blocks": 64}
    return LLM("s", **settings | options)


def run(*prompts, params=SHORT, **options):
    """The recording of prompts that run one after the other; a list of them runs together."""
    with make_llm(**options) as llm, record(llm) as recording:
        for prompt in prompts:
            llm.generate(prompt, params, use_tqdm=False)
    return recording


# -- where tokens came from ------------------------------------------------------------------


def test_each_token_has_its_block_its_storer_and_its_step():
    recording = run("the quick brown fox", "the quick red fox", "the quick brown dog")

    answer = recording.provenance("2")
    (admission,) = answer.admissions

    assert [(p.start, p.end, p.source, p.text) for p in admission.ranges] == [
        (0, 4, "cache", "the "),
        (4, 8, "cache", "quic"),
        (8, 12, "cache", "k br"),
        (12, 16, "cache", "own "),
        (16, 19, "computed", "dog"),
    ]
    assert [(p.block_id, p.stored_by, p.stored_step) for p in admission.ranges[:4]] == [
        (1, "0", 1),
        (2, "0", 1),
        (3, "0", 1),
        (4, "0", 1),
    ]
    assert admission.ranges[4].step == admission.step
    assert (admission.kind, admission.num_cached, admission.num_tokens) == ("new", 16, 19)
    assert str(answer) == (
        f"Request 2, step {admission.step}: 16 of 19 tokens came from the cache, "
        "blocks 1, 2, 3 and 4 that 0 filled in step 1. "
        "It missed from token 16: shorter than a block."
    )


def test_tokens_has_one_entry_per_token():
    recording = run("abcdefghij", "abcdefghij")

    tokens = recording.provenance("1").tokens

    assert [t.block_id for t in tokens] == [1] * 4 + [2] * 4 + [None] * 2
    assert all(t.start <= place < t.end for place, t in enumerate(tokens))


def test_a_prompt_read_in_pieces_says_which_step_computed_what():
    recording = run("a" * 20, max_num_batched_tokens=8)

    (admission,) = recording.provenance("0").admissions

    assert [(p.start, p.end, p.step) for p in admission.ranges] == [
        (0, 8, 1),
        (8, 16, 2),
        (16, 20, 3),
    ]


def test_coming_back_from_preemption_counts_the_output_too():
    params = SamplingParams(max_tokens=12)
    recording = run(["aaaaaaaa", "bbbbbbbb"], params=params, num_kv_blocks=9)
    (step,) = [b.step for b in recording.boundaries if getattr(b, "preempted_req_ids", ())]

    first, again = recording.provenance("1").admissions

    assert (first.kind, first.num_tokens, first.step) == ("new", 8, 1)
    assert again.kind == "resumed"
    assert again.step > step
    assert again.num_tokens > 8
    assert {p.stored_by for p in again.ranges if p.source == "cache"} == {"1"}
    assert "".join(p.text for p in again.ranges) == ("b" * 8 + "ABCDEFGHIJ")[: again.num_tokens]
    told = f"Resumed in step {again.step} with {again.num_cached} of {again.num_tokens} tokens"
    assert told in str(recording.provenance("1"))


def test_what_an_abort_left_undone_is_not_called_computed():
    with make_llm(max_num_batched_tokens=8) as llm, record(llm) as recording:
        llm.gate.pause()
        stream = llm.submit("a" * 30, SHORT)
        while recording.at().step < 2:
            llm.gate.step()
        stream.abort()
        llm.gate.resume()
        stream.wait(DEADLINE_S)

    ranges = recording.provenance("0").admissions[0].ranges

    assert [(p.source, p.start, p.end) for p in ranges] == [
        ("computed", 0, 8),
        ("computed", 8, 16),
        ("not_computed", 16, 30),
    ]


def test_a_request_that_was_never_admitted_says_so():
    with make_llm() as llm, record(llm) as recording:
        llm.gate.pause()
        stream = llm.submit("abc", SHORT)
        llm.gate.step()
        answer = recording.provenance("0")
        llm.gate.resume()
        stream.wait(DEADLINE_S)

    assert (answer.admissions, answer.tokens, answer.miss) == ((), (), None)
    assert str(answer) == "Request 0 was not admitted."


# -- why the rest missed ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "code"),
    [
        (15, 0, Miss.SHORTER_THAN_BLOCK),
        (16, 0, Miss.TAIL_RECOMPUTE),
        (17, 16, Miss.SHORTER_THAN_BLOCK),
        (32, 16, Miss.TAIL_RECOMPUTE),
        (33, 32, Miss.SHORTER_THAN_BLOCK),
    ],
)
def test_a_repeated_prompt_misses_its_last_block_only(num_tokens, num_cached, code):
    recording = run("x" * num_tokens, "x" * num_tokens, block_size=16)

    miss = recording.provenance("1").miss

    assert (miss.position, miss.code) == (num_cached, code)


def test_never_seen_names_the_longest_match_and_where_the_texts_part():
    recording = run("You are kind.", "You are a dog. Sit.", "You are a cat. Sit.")

    miss = recording.provenance("2").miss

    assert (miss.code, miss.position) == (Miss.NEVER_SEEN, 8)
    assert miss.match == PromptMatch("1", 10, ord("c"), "c", ord("d"), "d")
    assert str(recording.provenance("2")).endswith(
        'missed from token 8: never seen; 1 has the same first 10 tokens, then "d" where this '
        'one has "c".'
    )


def test_the_next_turn_of_a_conversation_is_compared_with_the_output_too():
    recording = run("Hi there", "Hi thereAZ and so on")

    assert recording.provenance("1").miss.match == PromptMatch("0", 9, ord("Z"), "Z", ord("B"), "B")


def test_an_earlier_prompt_that_ends_is_said_to_end():
    recording = run("abcd", "abcdefgh ij")
    match = recording.provenance("1").miss.match
    assert (match.num_tokens, match.other_token_id) == (4, ord("A"))  # its output goes on

    with make_llm() as llm, record(llm) as recording:
        llm.generate(["abcd", "abcdefgh ij"], SHORT, use_tqdm=False)

    assert recording.provenance("1").miss.match == PromptMatch("0", 4, ord("e"), "e")
    assert "0 has the same first 4 tokens and ends there, where this one has" in str(
        recording.provenance("1")
    )


def test_a_token_without_text_is_shown_by_its_number():
    # They differ in the third of the four bytes that make a character.
    recording = run("pepper 🌶, salt", "pepper 😀, salt")

    match = recording.provenance("1").miss.match

    assert (match.num_tokens, match.text, match.other_text) == (9, "", "")
    assert "then token 140 where this one has token 152" in str(recording.provenance("1"))


def test_tokens_that_an_earlier_request_had_not_computed_yet_are_said_to_be_its():
    recording = run(["a" * 30, "a" * 30], max_num_batched_tokens=40, long_prefill_token_threshold=8)

    answer = recording.provenance("1")

    assert answer.miss.position == 8
    assert answer.miss.match.is_uncomputed
    assert "0 has the same first 30 tokens, and had not computed them all" in str(answer)


def test_the_first_prompt_of_all_matches_nothing():
    assert "no earlier prompt begins with the same token" in str(run("abcd!").provenance("0"))


def test_evicted_names_the_step_and_for_whom():
    recording = run("abcdefgh!", "x" * 30, "abcdefgh!", num_kv_blocks=10)
    step = next(b.step for b in recording.boundaries if getattr(b, "scheduled_new_reqs", ())
                and b.scheduled_new_reqs[0].req_id == "1")  # fmt: skip

    miss = recording.provenance("2").miss

    assert (miss.code, miss.position, miss.other_id) == (Miss.EVICTED, 4, "1")
    assert (miss.block_id, miss.stored_by, miss.stored_step) == (2, "0", 1)
    assert miss.removed_step >= step
    assert (
        f"missed from token 4: evicted at {miss.removed_step} for 1; 0 had filled it at 1"
        in str(recording.provenance("2"))
    )


def test_a_reset_is_named_as_what_cleared_the_cache():
    with make_llm() as llm, record(llm) as recording:
        llm.generate("abcdefgh!", SHORT, use_tqdm=False)
        assert llm.reset_prefix_cache()
        llm.generate("abcdefgh!", SHORT, use_tqdm=False)

    miss = recording.provenance("1").miss

    assert (miss.code, miss.position, miss.stored_by) == (Miss.CLEARED, 0, "0")
    assert f"missed from token 0: cache reset at {miss.removed_step};" in str(
        recording.provenance("1")
    )


def test_the_same_tokens_under_another_salt_are_told_apart():
    prompts = [{"prompt": "abcdefgh!", "cache_salt": salt} for salt in "xy"]
    recording = run(*prompts)

    miss = recording.provenance("1").miss

    assert (miss.code, miss.position) == (Miss.OTHER_SALT, 0)
    assert (miss.block_id, miss.stored_by, miss.stored_step) == (1, "0", 1)


@pytest.mark.parametrize(
    ("options", "params", "words"),
    [
        ({"enable_prefix_caching": False}, {}, "prefix caching is off"),
        ({}, {"prompt_logprobs": 0}, "prompt_logprobs needs every prompt token computed"),
        ({}, {"skip_reading_prefix_cache": True}, "skip_reading_prefix_cache is set"),
    ],
)
def test_a_look_up_that_was_skipped_says_why(options, params, words):
    recording = run(
        "abcdefgh!", "abcdefgh!", params=SamplingParams(max_tokens=2, **params), **options
    )

    answer = recording.provenance("1")

    assert (answer.miss.code, answer.miss.position) == (Miss.LOOKUP_SKIPPED, 0)
    assert str(answer).endswith(f"missed from token 0: not looked up; {words}.")


# -- recordings of all kinds -----------------------------------------------------------------


def test_what_is_not_there_is_answered_with_what_is():
    recording = run(*(f"prompt {number}" for number in range(10)))
    with pytest.raises(RecordingError, match=r"'11', which is not in .* 0, 1, .*, 7 and 2 more"):
        recording.provenance("11")
    with make_llm() as llm, record(llm) as empty:
        pass
    with pytest.raises(RecordingError, match="known: none"):
        empty.provenance("0")


def test_a_recording_answers_while_it_grows():
    with make_llm() as llm, record(llm) as recording:
        for number in range(3):
            llm.generate("abcdefgh!", SHORT, use_tqdm=False)
            assert recording.provenance(str(number)).admissions[0].num_cached == 8 * (number > 0)


def test_an_id_that_came_again_is_answered_for_the_last_time():
    with make_llm() as llm, record(llm) as recording:
        for prompt in ("abcdefgh!", "something else", "abcdefgh??"):
            llm.submit(prompt, SHORT, request_id="same").wait(DEADLINE_S)

    answer = recording.provenance("same")

    assert answer.num_prompt_tokens == 10
    assert answer.admissions[0].num_cached == 8
    assert answer.admissions[0].ranges[0].stored_by == "same"


def test_saving_changes_no_answer(tmp_path):
    recording = run("abcdefgh!", "abcdefgh?", "abc", "abcdefgh!abcd")
    recording.save(tmp_path / "run.lmscope")
    opened = open_recording(tmp_path / "run.lmscope")

    for request_id in map(str, range(4)):
        assert opened.provenance(request_id) == recording.provenance(request_id)


def test_a_redacted_recording_tells_the_same_without_the_text():
    recording = run("You are a dog. Sit.", "You are a cat. Sit.")
    redacted = recording.redact().provenance("1")
    answer = recording.provenance("1")

    assert [(p.start, p.block_id, p.stored_by) for p in redacted.admissions[0].ranges] == [
        (p.start, p.block_id, p.stored_by) for p in answer.admissions[0].ranges
    ]
    assert redacted.miss.match.num_tokens == answer.miss.match.num_tokens == 10
    match = redacted.miss.match
    assert (match.text, match.other_text, redacted.tokens[0].text) == ("", "", "")
    told = f"then token {match.other_token_id} where this one has token {match.token_id}"
    assert told in str(redacted)


def test_a_recording_that_began_late_says_from_where_on_it_knows():
    with make_llm() as llm:
        llm.generate("abcdefgh!", SHORT, use_tqdm=False)
        with record(llm) as recording:
            llm.generate(["abcdefgh!", "abcdxyz! and more"], SHORT, use_tqdm=False)
    first = recording.steps[1]

    hit, new = recording.provenance("1"), recording.provenance("2")

    assert {(p.stored_by, p.stored_step) for p in hit.tokens[:8]} == {("0", 1)}
    assert (new.miss.code, new.miss.since_step) == (Miss.NEVER_SEEN, first)
    assert f"never seen since step {first}; 1 has the same first 4 tokens" in str(new)


def test_of_a_request_that_runs_already_it_knows_what_its_blocks_tell():
    with make_llm() as llm:
        llm.generate("abcdefgh!", SHORT, use_tqdm=False)
        llm.gate.pause()
        stream = llm.submit("abcdefgh and more", SamplingParams(max_tokens=6))
        llm.gate.step()
        llm.gate.step()
        with record(llm) as recording:
            llm.gate.resume()
            stream.wait(DEADLINE_S)

    answer = recording.provenance("1")
    (admission,) = answer.admissions

    assert (admission.step, admission.num_cached, admission.num_tokens) == (None, 8, 17)
    assert [(p.source, p.stored_by) for p in admission.ranges] == [
        ("cache", "0"),
        ("cache", "0"),
        ("computed", None),
    ]
    assert admission.miss.code is Miss.UNKNOWN
    assert f"decided before step {answer.since_step}, where the recording begins" in str(answer)
    assert str(answer).endswith(f"Steps before {answer.since_step} are not in this recording.")


def test_the_table_shows_every_range_and_escapes_what_users_chose():
    with make_llm() as llm, record(llm) as recording:
        llm.submit("<b>bold</b>", SHORT, request_id="<script>").wait(DEADLINE_S)
        llm.submit("<b>bold</b>", SHORT, request_id="other").wait(DEADLINE_S)

    table = recording.provenance("other")._repr_html_()

    assert "<script>" not in table
    assert "<b>" not in table
    assert "<td>&lt;script&gt;</td>" in table
    assert "<td>&lt;b&gt;b</td>" in table
    assert table.count("<tr>") == 1 + len(recording.provenance("other").admissions[0].ranges)
