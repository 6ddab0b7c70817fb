"""The torch sampler: worked examples, batches, logprobs and banned ids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baton_engine.interface import Sample
from baton_engine.sampling.sampler import CPU_PART
from baton_protocol.sampling import SamplingParams
from tests.support.engines.sampling import sample, shaped_logits

SEVEN = [0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02]
FIVE = [0.40, 0.30, 0.15, 0.10, 0.05]


def logs(probabilities: list[float]) -> list[float]:
    return [math.log(p) for p in probabilities]


def shaped(logits: list[float], **values: Any) -> list[float]:
    """The probabilities of one row after temperature and filters."""
    params = SamplingParams(**values)
    return shaped_logits(torch.tensor([logits]), [params]).softmax(-1)[0].tolist()


def kept(logits: list[float], **values: Any) -> list[int]:
    return [index for index, p in enumerate(shaped(logits, **values)) if p > 0]


def draw(logits: list[list[float]], params: list[SamplingParams], position: int = 0) -> list[int]:
    """Sample one id per row."""
    samples = [Sample(0, position, each) for each in params]
    rows = torch.tensor(logits)
    return [each.id for each in sample(rows, range(len(logits)), samples)]


def test_temperature_0_takes_the_largest_logit() -> None:
    assert draw([[2.0, 1.0, 0.5, 0.1]], [SamplingParams(temperature=0.0)]) == [0]


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [0.828162, 0.112080, 0.041232, 0.018527]),
        (1.0, [0.574522, 0.211355, 0.128193, 0.085930]),
        (2.0, [0.405575, 0.245993, 0.191580, 0.156852]),
    ],
)
def test_temperature_divides_the_logits(temperature: float, expected: list[float]) -> None:
    actual = shaped([2.0, 1.0, 0.5, 0.1], temperature=temperature)
    assert actual == pytest.approx(expected, abs=1e-5)


def test_a_greedy_row_takes_the_argmax_and_affects_no_other_row() -> None:
    logits = [[2.0, 1.0, 0.5, 0.1], [0.3, 0.1, 0.2, 0.15]]
    seeded = SamplingParams(temperature=1.0, seed=7)
    mixed = draw(logits, [SamplingParams(temperature=0.0), seeded])
    assert mixed[0] == 0
    assert mixed[1] == draw(logits[1:], [seeded])[0]


def test_top_k_keeps_the_k_largest_and_renormalises() -> None:
    actual = shaped([3.5, 2.1, 1.8, 0.5, 0.1, -0.2, -1.0], top_k=3)
    assert actual == pytest.approx([0.699653, 0.172532, 0.127815, 0, 0, 0, 0], abs=1e-5)
    actual = shaped(logs(FIVE), top_k=3)
    assert actual == pytest.approx([0.470588, 0.352941, 0.176471, 0, 0], abs=1e-5)


def test_top_k_keeps_tokens_that_tie_with_the_kth() -> None:
    assert kept([3.0, 2.0, 2.0, 1.0], top_k=2) == [0, 1, 2]


@pytest.mark.parametrize("top_k", [-1, 0, 4, 9])
def test_top_k_off_or_larger_than_the_vocabulary_keeps_all_tokens(top_k: int) -> None:
    assert kept([3.0, 2.0, 2.0, 1.0], top_k=top_k) == [0, 1, 2, 3]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    actual = shaped(logs(FIVE), top_p=0.9)
    assert actual == pytest.approx([0.421053, 0.315789, 0.157895, 0.105263, 0], abs=1e-5)
    assert kept(logs(SEVEN), top_p=0.85) == [0, 1, 2, 3]


def test_top_p_stops_where_the_mass_is_exactly_p() -> None:
    assert kept(logs(SEVEN), top_p=0.9) == [0, 1, 2, 3]


def test_top_p_keeps_the_same_tokens_in_any_order_of_the_vocabulary() -> None:
    order = [4, 0, 6, 2, 5, 1, 3]
    assert kept(logs([SEVEN[index] for index in order]), top_p=0.85) == [1, 3, 5, 6]


def test_a_tiny_top_p_keeps_the_top_token() -> None:
    assert kept(logs(SEVEN), top_p=1e-9) == [0]


def test_top_p_keeps_only_as_many_tied_tokens_as_it_needs() -> None:
    assert kept([1.0, 1.0, 1.0, 1.0], top_p=0.5) == [0, 1]


def test_top_p_can_keep_more_than_the_first_1024_tokens() -> None:
    """The sampler looks at the 1,024 likeliest tokens first. Here all 5,000 are equally likely."""
    assert len(kept([0.0] * 5000, top_p=0.5)) == pytest.approx(2500, abs=1)


def test_top_p_counts_the_probabilities_after_top_k() -> None:
    """After top-k, the first two of 0.4, 0.3 and 0.15 have 0.82 of the mass."""
    assert kept(logs(FIVE), top_k=3, top_p=0.8) == [0, 1]


@pytest.mark.parametrize(("min_p", "count"), [(0.1, 5), (0.2, 4), (0.3, 3), (0.5, 2), (0.0, 7)])
def test_min_p_is_relative_to_the_likeliest_token(min_p: float, count: int) -> None:
    assert kept(logs(SEVEN), min_p=min_p) == list(range(count))


def test_temperature_comes_before_min_p() -> None:
    assert kept([2.0, 1.0, 0.5, 0.1], temperature=2.0, min_p=0.5) == [0, 1]
    assert kept([2.0, 1.0, 0.5, 0.1], temperature=1.0, min_p=0.5) == [0]


def test_top_k_is_applied_after_temperature() -> None:
    actual = shaped([2.0, 1.0, 0.5, 0.1], temperature=0.5, top_k=2)
    assert actual == pytest.approx([0.880797, 0.119203, 0, 0], abs=1e-5)


def test_each_row_of_a_batch_is_filtered_by_its_own_parameters() -> None:
    logits = torch.tensor([logs(SEVEN)] * 4)
    params = [
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.85),
        SamplingParams(min_p=0.3),
        SamplingParams(),
    ]
    counts = (shaped_logits(logits, params) > -math.inf).sum(-1).tolist()
    assert counts == [2, 4, 3, 7]


def test_banned_ids_are_never_chosen_greedily_or_drawn() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]] * 2)
    samples = [
        Sample(0, 3, SamplingParams(temperature=0.0), banned=(0,)),
        Sample(0, 3, SamplingParams(seed=1, top_k=1), banned=(0, 2)),
    ]
    assert [each.id for each in sample(logits, [0, 1], samples)] == [1, 1]


def test_logprobs_ignore_temperature_and_include_the_sampled_tokens_rank() -> None:
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=2)
    [actual] = sample(torch.tensor([[1.0, 2.0, 0.5, 0.1]]), [0], [Sample(0, 0, params)])
    assert actual.id == 1
    assert actual.logprobs is not None
    assert actual.logprobs.sampled.logprob == pytest.approx(-0.55422, abs=1e-5)
    assert actual.logprobs.sampled.rank == 1
    assert [(each.id, each.rank) for each in actual.logprobs.top] == [(1, 1), (0, 2)]
    assert actual.logprobs.top[1].logprob == pytest.approx(-1.55422, abs=1e-5)


def test_the_rank_of_a_token_is_one_more_than_the_number_of_larger_logits() -> None:
    params = SamplingParams(temperature=0.0, logprobs=0)
    banned = Sample(0, 0, params, banned=(0, 1))
    [actual] = sample(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), [0], [banned])
    assert actual.logprobs is not None
    assert (actual.id, actual.logprobs.sampled.rank, actual.logprobs.top) == (2, 3, ())


def test_named_ids_have_their_logprobs_in_the_order_of_each_request() -> None:
    asked: list[tuple[int, ...]] = [(3, 0, 3), (), (1,)]
    params = [
        SamplingParams(temperature=0.5, seed=1, logprobs=2, logprob_token_ids=ids) for ids in asked
    ]
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, 0.0]])
    results = sample(logits, range(3), [Sample(0, 0, each) for each in params])
    for row, result, ids in zip(logits.log_softmax(-1).tolist(), results, asked, strict=True):
        assert result.logprobs is not None
        assert [(each.id, each.rank) for each in result.logprobs.named] == [(id, 0) for id in ids]
        assert [each.logprob for each in result.logprobs.named] == [row[id] for id in ids]
        assert len(result.logprobs.top) == 2


def test_naming_ids_asks_for_logprobs() -> None:
    params = SamplingParams(temperature=0.0, logprob_token_ids=(2,))
    [result] = sample(torch.tensor([[1.0, 2.0, 0.5]]), [0], [Sample(0, 0, params)])
    assert result.logprobs is not None
    assert (result.logprobs.top, [each.id for each in result.logprobs.named]) == ((), [2])


def test_only_samples_that_request_logprobs_get_them() -> None:
    with_logprobs = SamplingParams(temperature=0.0, logprobs=1)
    samples = [Sample(0, 0, SamplingParams(temperature=0.0)), Sample(0, 0, with_logprobs)]
    without, requested = sample(torch.zeros(2, 4), [0, 1], samples)
    assert without.logprobs is None
    assert requested.logprobs is not None


def test_each_choice_of_a_row_is_drawn_with_its_own_noise() -> None:
    params = SamplingParams(seed=3, n=8)
    samples = [Sample(choice, 5, params) for choice in range(8)]
    ids = [each.id for each in sample(torch.zeros(1, 1000), [0] * 8, samples)]
    assert len(set(ids)) > 4


def test_a_sample_does_not_depend_on_the_other_rows_or_their_order() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 500, generator=generator)
    params = [
        SamplingParams(seed=index, temperature=0.5 + index / 4, top_k=5 * index, top_p=0.9)
        for index in range(6)
    ]
    samples = [Sample(index % 2, 10 + index, each) for index, each in enumerate(params)]
    together = [each.id for each in sample(logits, range(6), samples)]
    backwards = sample(logits.flip(0), range(6), samples[::-1])
    alone = [sample(logits[i : i + 1], [0], samples[i : i + 1])[0].id for i in range(6)]
    assert together == [each.id for each in backwards][::-1] == alone


@pytest.mark.parametrize("greedy", [(), (1, 4)], ids=["all drawn", "some greedy"])
def test_samples_of_a_large_vocabulary_are_the_same_in_parts_and_alone(
    greedy: tuple[int, ...],
) -> None:
    """On a CPU the sampler draws two rows of this vocabulary at a time."""
    count, vocab = 5, CPU_PART // 2 - 7
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(0))
    samples = [
        Sample(0, at, SamplingParams(seed=at, temperature=0.0 if at in greedy else 1.3, top_p=0.99))
        for at in range(count)
    ]
    alone = [sample(logits[at : at + 1], [0], [each])[0] for at, each in enumerate(samples)]
    assert sample(logits, range(count), samples) == alone
