"""The sampler's promises, with logits small enough to check by eye.

Names with e and a number are sharp edges of the original engine; l, p and a number are hard
cases from bug reports.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from lmscope_kernels.numba_support import why_not_numba
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lmscope.execute import random_rows, sampler as sampler_module
from lmscope.execute.sampler import Sampler, SamplerOutput, SamplingRow
from lmscope.sampling_params import SamplingParams

INF = math.inf
# What each row of a batch may ask for, to be mixed.
ALL_KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 1.3, "top_k": 5, "logprobs": 0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1, "presence_penalty": 0.5, "logprobs": 3},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "logit_bias": {3: 2.0}},
    {"temperature": 0.0, "allowed_token_ids": (1, 2, 3)},
    {"temperature": 0.5, "frequency_penalty": -0.5, "logprobs": 2},
)


@pytest.fixture(autouse=True, params=["compiled", "in torch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if request.param == "in torch":
        monkeypatch.setattr(sampler_module, "sampling_loops", lambda vocab_size: None)
    elif why_not_numba() is not None:
        pytest.skip("needs the extra cpu")


def make_row(
    *,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
    **params: object,
) -> SamplingRow:
    """Greedy unless a temperature is given."""
    return SamplingRow(
        request_id="r",
        params=SamplingParams(**{"temperature": 0.0, **params}),
        prompt_token_ids=tuple(prompt),
        output_token_ids=list(output),
        seed=seed,
        stop_ids=frozenset(stop_ids),
        bad_words_ids=tuple(bad_words),
    )


def sample(logits: Sequence[Sequence[float]] | Tensor, *rows: SamplingRow) -> SamplerOutput:
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return Sampler(logits.shape[1]).sample(logits, rows)


def processed(logits: Sequence[float], row: SamplingRow) -> list[float]:
    """The logits that `row` draws from, or takes the largest of, by token id."""
    row = SamplingRow(
        row.request_id,
        row.params.replace(logprobs=-1),
        row.prompt_token_ids,
        row.output_token_ids,
        row.seed,
        row.stop_ids,
        row.bad_words_ids,
    )
    output = Sampler(len(logits), "processed_logits").sample(torch.tensor([logits]), [row])
    (lists,) = output.logprobs
    by_id = dict(zip(lists.logprob_token_ids[0][1:], lists.logprobs[0][1:], strict=True))
    return [by_id[token] for token in range(len(logits))]


def kept(logits: Sequence[float], **params: object) -> list[int]:
    """The tokens that can still be drawn."""
    row = make_row(**{"temperature": 1.0, **params})
    return [token for token, value in enumerate(processed(logits, row)) if value > -INF]


def log_of(*probabilities: float) -> list[float]:
    return [math.log(probability) for probability in probabilities]


# -- greedy ------------------------------------------------------------------------------


def test_greedy_takes_the_most_likely_token_of_each_row():
    output = sample([[1.0, 3.0, 2.0], [5.0, 3.0, 2.0]], make_row(), make_row())

    assert output.token_ids == [1, 0]
    assert output.logprobs == [None, None]
    assert output.errors == {}


def test_greedy_takes_the_first_of_two_equal_tokens():
    assert sample([[1.0, 3.0, 3.0]], make_row()).token_ids == [1]


def test_plain_greedy_rows_need_nothing_but_the_largest_logit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random_rows, "draw_tokens", None)
    monkeypatch.setattr(sampler_module, "gather_logprobs", None)
    logits = torch.zeros(2, 5)
    monkeypatch.setattr(logits, "to", None, raising=False)

    output = Sampler(5).sample(logits, [make_row(), make_row(seed=3)])

    assert output.token_ids == [0, 0]


def test_e34_a_greedy_row_is_the_same_with_any_seed():
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))

    tokens = {sample(logits, make_row(seed=seed)).token_ids[0] for seed in range(20)}

    assert tokens == {int(logits.argmax())}


def test_e36_a_greedy_batch_still_gets_bias_penalties_bad_words_and_min_tokens():
    logits = [[1.0, 1.5, 2.0, 3.0, 4.0]]

    assert sample(logits, make_row(logit_bias={1: 10.0})).token_ids == [1]
    assert sample(logits, make_row(presence_penalty=2.0, output=[4])).token_ids == [3]
    assert sample(logits, make_row(bad_words=[(4,)])).token_ids == [3]
    assert sample(logits, make_row(min_tokens=1, stop_ids=[4])).token_ids == [3]


def test_bfloat16_logits_are_sampled_too():
    logits = torch.tensor([[1.0, 3.0, 2.0], [1.0, 3.0, 40.0]], dtype=torch.bfloat16)

    output = Sampler(3).sample(logits, [make_row(logprobs=1), make_row(temperature=1.0)])

    assert output.token_ids == [1, 2]
    assert output.logprobs[0].logprobs[0][0] == pytest.approx(-0.4076, abs=1e-4)


# -- what a request changes in its logits ------------------------------------------------


def test_penalties_follow_the_reference_example():
    row = make_row(
        prompt=[0],
        output=[1, 1],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.1,
    )

    assert processed([2.0, -2.0, 1.0], row) == pytest.approx([1.0, -5.1, 1.0])


def test_repetition_counts_a_token_once_and_the_others_never_count_the_prompt():
    row = make_row(prompt=[0, 0, 1], output=[1, 2], repetition_penalty=2.0)
    assert processed([8.0, 8.0, 8.0, 8.0], row) == [4.0, 4.0, 4.0, 8.0]

    row = make_row(prompt=[0, 0, 1], output=[2, 2], frequency_penalty=1.0, presence_penalty=0.5)
    assert processed([8.0, 8.0, 8.0, 8.0], row) == [8.0, 8.0, 5.5, 8.0]


def test_allowed_tokens_bar_all_others():
    assert kept([1.0, 2.0, 3.0, 4.0], allowed_token_ids=[0, 2, 2]) == [0, 2]


def test_bias_comes_before_the_penalties():
    row = make_row(prompt=[0], logit_bias={0: 4.0}, repetition_penalty=2.0)

    assert processed([2.0, 1.0], row) == [3.0, 1.0]


def test_a_bad_word_of_one_token_is_always_barred_and_a_longer_one_before_its_end():
    bad_words = [(3,), (1, 2), (0, 1, 0)]
    logits = [1.0, 1.0, 1.0, 1.0]

    def barred(output: Sequence[int], prompt: Sequence[int] = (0,)) -> list[int]:
        row = make_row(prompt=prompt, output=output, bad_words=bad_words)
        return [token for token, value in enumerate(processed(logits, row)) if value == -INF]

    assert barred([]) == [3]
    assert barred([1]) == [2, 3]
    assert barred([2, 1]) == [2, 3]
    assert barred([0, 1]) == [0, 2, 3]
    assert barred([1, 0]) == [3]
    # The prompt is not looked at.
    assert barred([], prompt=[0, 1]) == [3]


def test_stop_tokens_are_barred_until_min_tokens_while_the_same_batch_goes_on():
    sampler, row = Sampler(3), make_row(min_tokens=2, max_tokens=9, stop_ids=[2])
    logits = torch.tensor([[0.0, 1.0, 2.0]])

    tokens = []
    for _ in range(4):
        tokens += sampler.sample(logits, [row]).token_ids
        row.output_token_ids.append(tokens[-1])

    assert tokens == [1, 1, 2, 2]


def test_p8_ids_without_a_logit_do_no_harm():
    row = make_row(
        prompt=[1, 99],
        min_tokens=1,
        stop_ids=[2, 99_999],
        bad_words=[(99,), (), (-1,)],
        logit_bias={99: 5.0},
        allowed_token_ids=[0, 1, 2, 99],
        repetition_penalty=2.0,
    )

    assert processed([1.0, 4.0, 3.0, 9.0], row) == [1.0, 2.0, -INF, -INF]


# -- filters -----------------------------------------------------------------------------


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely():
    logits = log_of(0.5, 0.24, 0.26)

    assert kept(logits, min_p=0.5) == [0, 2]
    assert kept(logits, min_p=1.0) == [0]
    assert kept([1.0, 1.0, 0.9], min_p=1.0) == [0, 1]


def test_min_p_comes_after_the_temperature():
    logits = log_of(0.8, 0.2)

    assert kept(logits, min_p=0.3) == [0]
    assert kept(logits, min_p=0.3, temperature=2.0) == [0, 1]


def test_e39_ties_at_the_top_k_threshold_are_all_kept():
    assert kept([1.0, 2.0, 2.0, 0.0], top_k=1) == [1, 2]


@pytest.mark.parametrize("top_k", [0, -1, 4, 5, 10**12])
def test_top_k_is_off_at_zero_minus_one_and_from_the_vocabulary_on(top_k: int):
    assert kept([1.0, 2.0, 3.0, 0.0], top_k=top_k) == [0, 1, 2, 3]


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = log_of(0.3, 0.5, 0.05, 0.15)

    assert kept(logits, top_p=1e-9) == [1]
    assert kept(logits, top_p=0.49) == [1]
    assert kept(logits, top_p=0.6) == [0, 1]
    assert kept(logits, top_p=0.81) == [0, 1, 3]
    assert kept(logits, top_p=0.96) == [0, 1, 2, 3]


def test_e40_top_p_counts_what_top_k_has_left():
    logits = log_of(0.5, 0.3, 0.15, 0.05)

    assert kept(logits, top_p=0.6) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.6) == [0]


def test_top_p_keeps_all_tokens_that_are_as_likely_as_the_last_one():
    assert kept([3.0, 1.0, 1.0, 1.0, -9.0], top_p=0.8) == [0, 1, 2, 3]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 5.0])
def test_top_p_of_a_large_vocabulary_is_that_of_a_whole_sort(top_p: float, spread: float):
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(8)) * spread

    tokens = kept(logits.tolist(), top_p=top_p)

    probabilities = logits.double().softmax(dim=0).sort(descending=True)
    before = probabilities.values.cumsum(dim=0) - probabilities.values
    # A token within rounding of the bound may be kept or not.
    surely = set(probabilities.indices[before < top_p - 1e-5].tolist())
    at_most = set(probabilities.indices[before < top_p + 1e-5].tolist())
    assert surely <= set(tokens) <= at_most


def test_p11_top_k_of_one_is_greedy():
    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(4))
    rows = [make_row(temperature=1.7, top_k=1, seed=seed) for seed in range(20)]

    assert sample(logits, *rows).token_ids == logits.argmax(dim=-1).tolist()


# -- draws -------------------------------------------------------------------------------


def test_p1_a_seeded_row_is_the_same_alone_and_as_the_middle_one_of_three():
    logits = torch.randn(3, 501, generator=torch.Generator().manual_seed(3))
    row = make_row(temperature=1.0, seed=7)

    for _ in range(30):
        alone = sample(logits[1:2], row).token_ids[0]
        among = sample(logits, make_row(temperature=0.5), row, make_row(temperature=2.0, seed=7))
        reverse = sample(logits.flip(0), make_row(), row, make_row(temperature=1.0, seed=9))

        assert among.token_ids[1] == reverse.token_ids[1] == alone
        row.output_token_ids.append(alone)
    assert len(set(row.output_token_ids)) > 20


def test_every_kind_of_row_gives_the_same_alone_and_in_any_batch():
    logits = torch.randn(len(ALL_KINDS), 700, generator=torch.Generator().manual_seed(2)) * 3
    rows = [
        make_row(prompt=[5, 6], output=[3, 3, 8], seed=i, **params)
        for i, params in enumerate(ALL_KINDS)
    ]

    whole = sample(logits, *rows)

    order = list(range(len(rows)))
    for turn in range(5):
        random.Random(turn).shuffle(order)
        some = order[: 3 + turn]
        output = sample(logits[some], *[rows[i] for i in some])
        assert output.token_ids == [whole.token_ids[i] for i in some]
        assert output.logprobs == [whole.logprobs[i] for i in some]


def test_rows_that_are_drawn_in_parts_draw_the_same(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(11, 700, generator=generator)
    kinds: list[dict[str, object]] = [{"temperature": 0}, {"top_p": 0.8}, {"top_k": 9}, {}]
    rows = [make_row(seed=i, logprobs=1, **{"temperature": 1.5} | kinds[i % 4]) for i in range(11)]
    together = Sampler(700, "processed_logits")
    expected, processed = together.sample(logits, rows), together.process(logits, rows)
    for most in (1, 3, 8):
        monkeypatch.setattr(random_rows, "_MOST_ROWS_ON_CPU", most)
        in_parts = Sampler(700, "processed_logits")
        assert in_parts.sample(logits, rows) == expected
        assert in_parts.process(logits, rows).equal(processed)


class Counted(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_calls += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 20, "min_p": 0.01},
        {"temperature": 0, "logprobs": 5},
    ],
)
def test_torch_is_asked_as_often_for_many_rows_as_for_two(params: dict[str, object]):
    logits = 4 * torch.randn(16, 5_000, generator=torch.Generator().manual_seed(0))
    num_calls = []
    for count in (2, 16):
        rows = [make_row(seed=i, **params) for i in range(count)]
        sampler = Sampler(5_000)
        sampler.sample(logits[:count], rows)
        with Counted() as counted:
            sampler.sample(logits[:count], rows)
        num_calls.append(counted.num_calls)

    assert num_calls[0] == num_calls[1]
    assert num_calls[0] > 0


def test_e32_a_draw_that_is_thrown_away_changes_nothing():
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5))
    sampler, row = Sampler(300), make_row(temperature=1.0, seed=1)

    first = [sampler.sample(logits, [row]).token_ids for _ in range(3)]

    assert first[0] == first[1] == first[2]


def test_e33_greedy_neighbours_leave_a_seeded_row_its_own_draws():
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(6))
    seeded = make_row(temperature=1.0, seed=4)

    mixed = sample(logits, make_row(), seeded)

    assert mixed.token_ids[0] == int(logits[0].argmax())
    assert mixed.token_ids[1] == sample(logits[1:], seeded).token_ids[0]


def test_e35_the_lowest_temperature_is_still_random():
    logits = torch.zeros(30, 10)
    rows = [make_row(temperature=1e-6, seed=seed) for seed in range(30)]

    assert len(set(sample(logits, *rows).token_ids)) > 5


def test_filtered_tokens_are_never_drawn():
    logits = torch.zeros(300, 40)
    rows = [make_row(temperature=1.0, allowed_token_ids=[3, 30], seed=i) for i in range(300)]

    assert set(sample(logits, *rows).token_ids) == {3, 30}


def test_p9_sampling_leaves_the_users_random_state_alone():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    logits = torch.ones(len(ALL_KINDS), 60)

    sample(logits, *[make_row(**params) for params in ALL_KINDS])

    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_users_default_dtype_changes_nothing():
    logits = torch.randn(3, 60, generator=torch.Generator().manual_seed(2))
    rows = [
        make_row(temperature=0.7, min_p=0.01, top_p=0.9, logprobs=-1),
        make_row(temperature=0.3, top_k=7, logprobs=-1),
        make_row(logit_bias={3: 0.1}, presence_penalty=0.3, output=[4], logprobs=-1),
    ]
    sampler = Sampler(60, "processed_logits")
    expected = sampler.sample(logits, rows)

    torch.set_default_dtype(torch.float64)
    try:
        assert Sampler(60, "processed_logits").sample(logits, rows) == expected
    finally:
        torch.set_default_dtype(torch.float32)


# -- log probabilities -------------------------------------------------------------------


def test_l1_zero_logprobs_is_the_chosen_token_alone():
    (lists,) = sample([log_of(0.2, 0.7, 0.1)], make_row(logprobs=0)).logprobs

    assert lists.logprob_token_ids == ((1,),)
    assert lists.logprobs[0] == pytest.approx(log_of(0.7))
    assert lists.sampled_token_ranks == (1,)


def test_l1_a_token_outside_the_top_k_has_its_true_rank():
    row = make_row(logprobs=2, allowed_token_ids=[2])

    (lists,) = sample([log_of(0.4, 0.3, 0.1, 0.2)], row).logprobs

    assert lists.logprob_token_ids == ((2, 0, 1),)
    assert lists.logprobs[0] == pytest.approx(log_of(0.1, 0.4, 0.3))
    assert lists.sampled_token_ranks == (4,)


def test_ranks_count_ties():
    (lists,) = sample([[1.0, 2.0, 2.0, 2.0]], make_row(logprobs=0)).logprobs

    assert lists.sampled_token_ranks == (3,)


def test_l2_e37_raw_logprobs_do_not_see_temperature_bias_or_filters():
    logits = [log_of(0.5, 0.3, 0.2)]
    same = [
        make_row(temperature=0.2, logprobs=-1, logit_bias={2: 100.0}),
        make_row(temperature=2.0, logprobs=-1, allowed_token_ids=[2]),
        make_row(temperature=1.0, logprobs=-1, bad_words=[(0,), (1,)], top_k=1, top_p=0.1),
    ]

    for row in same:
        (lists,) = sample(logits, row).logprobs
        assert lists.logprob_token_ids == ((2, 0, 1, 2),)
        assert lists.logprobs[0] == pytest.approx(log_of(0.2, 0.5, 0.3, 0.2))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("raw_logprobs", log_of(0.3, 0.5)),
        ("raw_logits", log_of(3.0, 5.0)),
        ("processed_logprobs", [0.0, -INF]),
        ("processed_logits", [2 * math.log(3.0), -INF]),
    ],
)
def test_each_mode_reports_its_own_numbers(mode: str, expected: list[float]):
    logits = torch.tensor([log_of(5.0, 3.0, 2.0)])
    row = make_row(temperature=0.5, bad_words=[(0,)], top_k=1, logprobs=3)

    (lists,) = Sampler(3, mode).sample(logits, [row]).logprobs

    by_id = dict(zip(lists.logprob_token_ids[0], lists.logprobs[0], strict=True))
    assert lists.logprob_token_ids[0][0] == 1
    assert [by_id[1], by_id[0]] == pytest.approx(expected)


def test_l5_e38_each_row_gets_its_own_k():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    rows = [make_row(logprobs=k) for k in (1, None, 5, -1)]

    output = sample(logits, *rows)

    widths = [lists and len(lists.logprobs[0]) for lists in output.logprobs]
    assert widths == [2, None, 6, 31]


def test_more_logprobs_than_tokens_are_all_of_them():
    (lists,) = sample([[1.0, 2.0, 3.0]], make_row(logprobs=20)).logprobs

    assert lists.logprob_token_ids == ((2, 2, 1, 0),)


def test_prompt_logprobs_are_those_of_the_following_tokens():
    logits = torch.tensor([log_of(0.2, 0.7, 0.1), log_of(0.6, 0.3, 0.1)], dtype=torch.float64)

    lists = Sampler(3).prompt_logprobs(logits, [2, 0], 1)

    assert lists.logprob_token_ids == ((2, 1), (0, 0))
    assert lists.logprobs[0] == pytest.approx(log_of(0.1, 0.7))
    assert lists.logprobs[1] == pytest.approx(log_of(0.6, 0.6))
    assert lists.sampled_token_ranks == (3, 1)


def test_prompt_logprobs_of_a_prompt_of_one_token_are_empty():
    lists = Sampler(5).prompt_logprobs(torch.empty(0, 5), [], 2)

    assert lists.logprobs == ()
    assert lists.sampled_token_ranks == ()


def test_an_unknown_mode_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="'raw_logprob'; did you mean raw_logprobs"):
        Sampler(10, "raw_logprob")


# -- what must not happen ----------------------------------------------------------------


@pytest.mark.parametrize("kinds", [ALL_KINDS, *((kind,) for kind in ALL_KINDS)], ids=str)
def test_the_logits_and_the_rows_are_not_changed(kinds: tuple[dict[str, object], ...]):
    logits = torch.randn(len(kinds), 60, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    rows = [make_row(prompt=[1], output=[2], **params) for params in kinds]

    sample(logits, *rows)

    assert torch.equal(logits, before)
    assert all(row.output_token_ids == [2] for row in rows)


def test_what_was_worked_out_for_other_rows_is_not_used():
    sampler = Sampler(3)
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    one, two = make_row(allowed_token_ids=[0]), make_row(allowed_token_ids=[1])

    assert sampler.sample(logits, [one, two]).token_ids == [0, 1]
    assert sampler.sample(logits, [two, one]).token_ids == [1, 0]
    assert sampler.sample(logits[:1], [two]).token_ids == [1]
    assert sampler.sample(logits, [two, make_row()]).token_ids == [1, 2]
    assert sampler.sample(logits[:0], []).token_ids == []


def test_rows_are_worked_out_once_while_the_batch_is_the_same(monkeypatch: pytest.MonkeyPatch):
    sampler, rows = Sampler(5), [make_row(temperature=1.0), make_row(top_k=2)]
    made = []
    monkeypatch.setattr(
        sampler_module,
        "_Batch",
        lambda *args, make=sampler_module._Batch: made.append(1) or make(*args),
    )

    for _ in range(3):
        sampler.sample(torch.zeros(2, 5), list(rows))

    assert len(made) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_nan_fails_alone(temperature: float):
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, math.nan, 3.0], [1.0, 2.0, 3.0]])
    row = make_row(temperature=temperature, top_p=0.5, top_k=2, min_p=0.1)

    output = sample(logits, make_row(), row, make_row(allowed_token_ids=[0]))

    assert list(output.errors) == [1]
    assert "NaN" in output.errors[1]
    assert [output.token_ids[0], output.token_ids[2]] == [2, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_every_token_is_barred_fails_alone(temperature: float):
    params = {"temperature": temperature, "allowed_token_ids": [1], "top_p": 0.5, "min_p": 0.1}
    row = make_row(output=[1], bad_words=[(1, 1)], **params)

    output = sample([[1.0, 2.0, 3.0]] * 2, row, make_row())

    assert list(output.errors) == [0]
    assert "every token is barred" in output.errors[0]
    assert output.token_ids[1] == 2


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1e300},
        {"temperature": 1e300, "top_p": 1e-300},
        {"temperature": 1.0, "logit_bias": {0: 1e300, 1: 1e300}},
        {"temperature": 1.0, "logit_bias": {1: -1e300, 2: -1e300}},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"temperature": 1.0, "top_p": 1 - 1e-12, "min_p": 1e-300},
    ],
    ids=str,
)
def test_absurd_values_neither_fail_nor_let_a_barred_token_through(params: dict[str, object]):
    row = make_row(prompt=[0, 1, 2], output=[2], bad_words=[(0,)], **params)

    for position in range(20):
        output = sample([[1.0, 0.0, -2.0, 0.5]], row)

        assert output.errors == {}
        assert output.token_ids[0] != 0
        row.output_token_ids.append(position % 3)
