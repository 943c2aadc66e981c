"""Log probabilities as the user gets them: order, ranks, labels.

Tokens are bytes, so 240, 159, 140 and 182 together are the character 🌶.
"""

from __future__ import annotations

import pytest

from lmscope.boundary import EngineCoreRequest, Logprob, LogprobsLists
from lmscope.frontend.logprobs import LogprobsProcessor
from lmscope.frontend.tokenizer import TokenTexts
from lmscope.sampling_params import SamplingParams
from lmscope.testing import byte_tokenizer

TEXTS = TokenTexts(lambda ids: bytes(ids).decode(errors="replace"))


def lists_of(*positions: tuple[list[int], int]) -> LogprobsLists:
    """Columns for each position, with values that fall from column to column, and a rank."""
    return LogprobsLists(
        tuple(tuple(ids) for ids, _ in positions),
        tuple(tuple(-0.5 * (i + 1) for i in range(len(ids))) for ids, _ in positions),
        tuple(rank for _, rank in positions),
    )


def labels_of(*rows: list[int]) -> list[list[str | None]]:
    processor = LogprobsProcessor(-1, None, TEXTS)
    positions = processor.update_sample(lists_of(*((row, 1) for row in rows)))
    return [[each.decoded_token for each in position.values()] for position in positions]


def test_l1_the_chosen_token_comes_first_with_its_true_rank():
    processor = LogprobsProcessor(2, None, TEXTS)

    (position,) = processor.update_sample(lists_of(([99, 97, 98], 40)))

    assert position == {
        99: Logprob(-0.5, 40, "c"),
        97: Logprob(-1.0, 1, "a"),
        98: Logprob(-1.5, 2, "b"),
    }
    assert list(position) == [99, 97, 98]


def test_l1_a_chosen_token_among_the_most_likely_is_there_once():
    processor = LogprobsProcessor(2, None, TEXTS)

    (position,) = processor.update_sample(lists_of(([97, 98, 97], 2)))

    assert list(position) == [97, 98]
    # The entry from among the most likely, in the first place.
    assert position[97] == Logprob(-1.5, 2, "a")


@pytest.mark.parametrize(("k", "tokens"), [(0, [97]), (1, [97, 98]), (-1, [97, 98, 99])])
def test_columns_that_only_others_asked_for_are_left_out(k: int, tokens: list[int]):
    processor = LogprobsProcessor(k, None, TEXTS)

    (position,) = processor.update_sample(lists_of(([97, 98, 99], 3)))

    assert list(position) == tokens


def test_the_cumulative_logprob_is_the_sum_over_chosen_tokens():
    processor = LogprobsProcessor(1, None, TEXTS)
    assert processor.cumulative_logprob == 0.0

    processor.update_sample(lists_of(([97, 98], 2), ([98, 97], 2)))
    processor.update_sample(lists_of(([97, 98], 2)))

    assert processor.cumulative_logprob == -1.5


def test_nothing_is_made_of_what_was_not_asked_for():
    processor = LogprobsProcessor(None, None, TEXTS)

    assert processor.update_sample(lists_of(([97], 1))) == ()
    assert processor.update_prompt(lists_of(([97], 1))) == ()
    assert processor.cumulative_logprob is None


def test_d7_a_part_of_a_character_has_an_empty_label_until_it_completes_one():
    assert labels_of([240], [159], [140], [182]) == [[""], [""], [""], [""]]
    # Two bytes make a whole one.
    assert labels_of([195], [169]) == [[""], ["é"]]


def test_d7_no_label_is_a_bare_replacement_character():
    labels = labels_of([240, 97, 182], [159, 195, 169], [255, 254, 98])

    assert labels == [["", "a", ""], ["", "", "é"], ["", "", "b"]]


def test_a_label_is_completed_across_calls():
    processor = LogprobsProcessor(0, None, TEXTS)

    processor.update_sample(lists_of(([195], 1)))
    (position,) = processor.update_sample(lists_of(([169], 1)))

    assert position[169].decoded_token == "é"


def test_the_prompt_starts_with_none():
    processor = LogprobsProcessor(None, 1, TEXTS)

    prompt = processor.update_prompt(lists_of(([98, 97], 2), ([97, 98], 1)))

    assert prompt == (
        None,
        {98: Logprob(-0.5, 2, "b"), 97: Logprob(-1.0, 1, "a")},
        {97: Logprob(-0.5, 1, "a"), 98: Logprob(-1.0, 1, "b")},
    )


def test_the_prompt_of_one_token_is_none_alone():
    processor = LogprobsProcessor(None, 1, TEXTS)

    assert processor.update_prompt(LogprobsLists((), (), ())) == (None,)


def test_labels_of_the_prompt_do_not_look_at_the_output():
    processor = LogprobsProcessor(0, 0, TEXTS)
    processor.update_sample(lists_of(([195], 1)))

    (_, position) = processor.update_prompt(lists_of(([169], 1)))

    assert position[169].decoded_token == ""


@pytest.mark.parametrize(("detokenize", "label"), [(True, "<END>"), (False, None)])
def test_d6_a_request_without_text_has_no_labels(detokenize: bool, label: str | None):
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=(97,),
        sampling_params=SamplingParams(logprobs=0, detokenize=detokenize),
    )
    processor = LogprobsProcessor.for_request(byte_tokenizer(), request)

    (position,) = processor.update_sample(lists_of(([256], 1)))

    assert position[256].decoded_token == label


def test_a_model_without_a_tokenizer_has_no_labels():
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=(97,), sampling_params=SamplingParams(logprobs=0)
    )
    processor = LogprobsProcessor.for_request(None, request)

    (position,) = processor.update_sample(lists_of(([7], 1)))

    assert position == {7: Logprob(-0.5, 1, None)}
