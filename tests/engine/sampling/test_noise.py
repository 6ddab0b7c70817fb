"""The Gumbel noise: a pure function of its keys, with the documented arithmetic and
distribution."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.interface import Sample
from baton_engine.sampling.gumbel import W_MAX, gumbel
from baton_engine.sampling.metadata import KEY_A, draws_of
from baton_protocol.sampling import SamplingParams
from tests.support.engines.sampling import noise_keys, sample

CPU = torch.device("cpu")
MASK = 0xFFFFFFFF


def mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & MASK
    x ^= x >> 13
    x = x * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)


def noise_of(a: int, b: int, token: int) -> float:
    """The noise of one token by its definition, in Python's integers and floats."""
    bits = mix32((mix32(token ^ a) + b) & MASK)
    return -math.log(-math.log1p(-min((bits + 0.5) / 2**32, W_MAX)))


@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 2**20), st.integers(0, 99)
)
def test_the_noise_equals_its_definition(seed: int, choice: int, position: int, token: int) -> None:
    a, b = noise_keys(seed, choice, position)
    actual = float(gumbel([(a, b)], 100, CPU)[0, token])
    # float32 rounds w, and the logarithms amplify the error if w is close to 1.
    assert math.isclose(actual, noise_of(a, b, token), rel_tol=1e-4, abs_tol=1e-2)


def test_seed_choice_and_position_each_change_the_keys() -> None:
    keys = {
        noise_keys(seed, choice, position)
        for seed in (-1, 0, 1, 2**40)
        for choice in range(4)
        for position in range(50)
    }
    assert len(keys) == 4 * 4 * 50


@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 127), st.integers(0, 2**20)),
        min_size=1,
        max_size=5,
    )
)
def test_keys_of_a_batch_equal_keys_computed_one_by_one(
    parts: list[tuple[int, int, int]],
) -> None:
    samples = [
        Sample(choice, position, SamplingParams(seed=seed)) for seed, choice, position in parts
    ]
    keys = draws_of(samples, CPU).host_6S[KEY_A:]
    assert keys.T.tolist() == [list(noise_keys(*each)) for each in parts]


def test_the_noise_is_finite_for_every_token_of_a_large_vocabulary() -> None:
    noise = gumbel([noise_keys(seed, 0, 0) for seed in range(20)], 200_000, CPU)
    assert bool(noise.isfinite().all())


def test_the_noise_is_gumbel_distributed() -> None:
    """Over 2 million draws, the mean is 0.5772 within 5 standard errors and the variance is close
    to pi^2 / 6."""
    noise = gumbel([noise_keys(seed, 1, 2) for seed in range(20)], 100_000, CPU).double()
    variance = math.pi**2 / 6
    assert abs(noise.mean().item() - 0.577216) < 5 * math.sqrt(variance / 2e6)
    assert abs(noise.var().item() - variance) < 0.02


def test_drawn_tokens_have_the_probabilities_of_the_softmax() -> None:
    """Over 20,000 positions of one seed, each frequency is within 5 standard errors."""
    probabilities = [0.5, 0.25, 0.15, 0.08, 0.02]
    count = 20_000
    logits = torch.tensor([[math.log(p) for p in probabilities]])
    samples = [Sample(0, position, SamplingParams(seed=42)) for position in range(count)]
    ids = torch.tensor([each.id for each in sample(logits, [0] * count, samples)])
    for token, p in enumerate(probabilities):
        error = math.sqrt(p * (1 - p) / count)
        assert abs((ids == token).float().mean().item() - p) < 5 * error


def test_neighbouring_positions_are_not_correlated() -> None:
    noise = gumbel([noise_keys(0, 0, position) for position in range(200)], 5000, CPU)
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation - torch.eye(200)
    assert off_diagonal.abs().max().item() < 6 / math.sqrt(5000)
