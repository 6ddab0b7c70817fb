"""Sampling (O-SMP): from logits to probabilities, penalties, logprobs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baton_engine.interface import PenaltyCounts, Sample, Sampled
from baton_engine.sampling.logits_processors import change_logits
from baton_protocol.sampling import SamplingParams
from tests.support.engines.sampling import sample, shaped_logits

FOUR = [2.0, 1.0, 0.5, 0.1]
FIVE = [math.log(p) for p in (0.40, 0.30, 0.15, 0.10, 0.05)]
SEVEN = [math.log(p) for p in (0.40, 0.25, 0.15, 0.10, 0.05, 0.03, 0.02)]
FOUR_OF_SEVEN = [0.444444, 0.277778, 0.166667, 0.111111]


def shaped(logits: list[float], **params: Any) -> list[float]:
    """The probability of each token after temperature and filters."""
    actual = shaped_logits(torch.tensor([logits]), [SamplingParams(**params)])
    return actual.softmax(-1)[0].tolist()


def close(expected: list[float], size: int) -> Any:
    """`expected`, then zeros, to six decimals."""
    return pytest.approx([*expected, *[0.0] * (size - len(expected))], abs=1e-6)


def kept(logits: list[float], **params: Any) -> list[int]:
    return [index for index, p in enumerate(shaped(logits, **params)) if p > 0]


def sampled(logits: list[list[float]], *params: SamplingParams) -> list[Sampled]:
    return sample(torch.tensor(logits), range(len(logits)), [Sample(0, 9, each) for each in params])


def penalised(logit: float, count: int = 3, **params: Any) -> float:
    """The penalised logit of token 1 of three, which was generated `count` times. The other logits
    must not change."""
    seen = PenaltyCounts(prompt=(), outputs={1: count})
    rows = torch.tensor([[0.25, logit, -0.25]])
    [actual] = change_logits(
        rows, [Sample(0, 9, SamplingParams(**params), penalty_counts=seen)]
    ).tolist()
    assert (actual[0], actual[2]) == (0.25, -0.25)
    return float(actual[1])


def test_greedy_sampling_takes_the_largest_logit_O_SMP_1() -> None:
    [actual] = sampled([FOUR], SamplingParams(temperature=0.0))
    assert actual.id == 0


@pytest.mark.parametrize(
    ("temperature", "scaled", "expected"),
    [
        (0.5, [4.0, 2.0, 1.0, 0.2], [0.828162, 0.112080, 0.041232, 0.018527]),
        (1.0, FOUR, [0.574522, 0.211355, 0.128193, 0.085930]),
        (2.0, [1.0, 0.5, 0.25, 0.05], [0.405575, 0.245993, 0.191580, 0.156852]),
    ],
)
def test_temperature_divides_logits_O_SMP_2_O_SMP_2b_O_SMP_2c(
    temperature: float, scaled: list[float], expected: list[float]
) -> None:
    params = SamplingParams(temperature=temperature)
    assert shaped_logits(torch.tensor([FOUR]), [params])[0].tolist() == pytest.approx(scaled)
    assert shaped(FOUR, temperature=temperature) == close(expected, 4)


def test_logprobs_are_the_log_softmax_of_the_logits_O_SMP_2b() -> None:
    [actual] = sampled([FOUR], SamplingParams(temperature=0.0, logprobs=4))
    assert actual.logprobs is not None
    assert [each.logprob for each in actual.logprobs.top] == pytest.approx(
        [-0.55422, -1.55422, -2.05422, -2.45422], abs=5e-6
    )


def test_temperature_0_affects_only_its_own_row_of_a_batch_O_SMP_2d() -> None:
    greedy = SamplingParams(temperature=0.0)
    other = [0.3, 0.1, 0.2, 0.15]
    for seed in range(20):
        drawn = SamplingParams(temperature=1.0, seed=seed)
        mixed = [each.id for each in sampled([FOUR, other], greedy, drawn)]
        assert mixed == [0, sampled([other], drawn)[0].id]


def test_top_k_keeps_the_k_largest_logits_O_SMP_3() -> None:
    logits = [3.5, 2.1, 1.8, 0.5, 0.1, -0.2, -1.0]
    [actual] = shaped_logits(torch.tensor([logits]), [SamplingParams(top_k=3)]).tolist()
    assert actual == pytest.approx([*logits[:3], *[-math.inf] * 4])
    assert shaped(logits, top_k=3) == close([0.699653, 0.172532, 0.127815], 7)


def test_top_k_renormalises_probabilities_O_SMP_3b() -> None:
    assert shaped(FIVE, top_k=3) == close([0.470588, 0.352941, 0.176471], 5)


def test_top_k_keeps_tokens_that_tie_with_the_kth_O_SMP_3c() -> None:
    assert kept([3.0, 2.0, 2.0, 1.0], top_k=2) == [0, 1, 2]


def test_top_p_keeps_the_token_that_crosses_p_O_SMP_4() -> None:
    assert shaped(FIVE, top_p=0.9) == close([0.421053, 0.315789, 0.157895, 0.105263], 5)


@pytest.mark.parametrize("top_p", [0.9, 0.85])
def test_top_p_keeps_the_smallest_set_that_reaches_p_O_SMP_4b_O_SMP_4c(top_p: float) -> None:
    assert shaped(SEVEN, top_p=top_p) == close(FOUR_OF_SEVEN, 7)


def test_a_tiny_top_p_keeps_the_top_token_O_SMP_4d() -> None:
    assert kept(SEVEN, top_p=1e-9) == [0]


def test_top_p_does_not_depend_on_the_order_of_the_vocabulary_O_SMP_4e() -> None:
    order = [4, 0, 6, 2, 5, 1, 3]
    actual = shaped([SEVEN[index] for index in order], top_p=0.85)
    expected = [FOUR_OF_SEVEN[index] if index < 4 else 0.0 for index in order]
    assert actual == close(expected, 7)


@pytest.mark.parametrize(("min_p", "count"), [(0.1, 5), (0.2, 4), (0.3, 3), (0.5, 2)])
def test_min_p_is_relative_to_the_likeliest_token_O_SMP_5(min_p: float, count: int) -> None:
    assert kept(SEVEN, min_p=min_p) == list(range(count))


def test_temperature_comes_before_min_p_O_SMP_6() -> None:
    assert 0.5 * shaped(FOUR, temperature=2.0)[0] == pytest.approx(0.202787, abs=1e-6)
    assert kept(FOUR, temperature=2.0, min_p=0.5) == [0, 1]
    assert 0.5 * shaped(FOUR)[0] == pytest.approx(0.287261, abs=1e-6)
    assert kept(FOUR, min_p=0.5) == [0]


def test_temperature_comes_before_top_k_O_SMP_6b() -> None:
    assert shaped(FOUR, temperature=0.5, top_k=2) == close([0.880797, 0.119203], 4)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_O_SMP_7() -> None:
    assert penalised(2.5, repetition_penalty=1.2) == pytest.approx(2.083333, abs=1e-6)
    assert penalised(-0.5, repetition_penalty=1.2) == pytest.approx(-0.6, abs=1e-6)


def test_frequency_penalty_grows_with_the_count_O_SMP_7b() -> None:
    assert penalised(2.5, frequency_penalty=0.5) == pytest.approx(1.0)


@pytest.mark.parametrize("count", [1, 3, 30])
def test_presence_penalty_does_not_depend_on_the_count_O_SMP_7c(count: int) -> None:
    assert penalised(2.5, count, presence_penalty=0.5) == pytest.approx(2.0)


def test_all_three_penalties_combine_O_SMP_7d() -> None:
    actual = penalised(2.5, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5)
    assert actual == pytest.approx(0.083333, abs=1e-6)


def test_penalties_are_applied_before_a_token_is_sampled_O_SMP_7d() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5
    )
    rows = torch.tensor([[2.5, 0.084, -1.0]])
    for outputs, id in (({0: 3}, 1), ({}, 0)):
        [actual] = sample(
            rows, [0], [Sample(0, 9, params, penalty_counts=PenaltyCounts((), outputs))]
        )
        assert actual.id == id


def test_logprobs_ignore_all_parameters_that_change_logits_O_SMP_8() -> None:
    plain = SamplingParams(temperature=0.0, logprobs=4)
    changing = SamplingParams(
        temperature=0.5, top_k=1, logprobs=4, frequency_penalty=1.0, logit_bias=((3, 1.0),)
    )
    seen = PenaltyCounts(prompt=(), outputs={2: 1})
    [expected] = sampled([FOUR], plain)
    [actual] = sample(torch.tensor([FOUR]), [0], [Sample(0, 9, changing, penalty_counts=seen)])
    assert expected.logprobs is not None
    assert actual.logprobs == expected.logprobs


@pytest.mark.parametrize("k", [0, 1, 3])
def test_logprobs_start_with_the_sampled_token_and_its_rank_O_SMP_9(k: int) -> None:
    params = SamplingParams(temperature=0.0, logprobs=k)
    [actual] = sample(torch.tensor([FOUR]), [0], [Sample(0, 9, params, banned=(0, 1))])
    assert actual.logprobs is not None
    assert (actual.id, actual.logprobs.sampled.id, actual.logprobs.sampled.rank) == (2, 2, 3)
    assert len((actual.logprobs.sampled, *actual.logprobs.top)) == k + 1
