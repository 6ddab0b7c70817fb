"""Sampled tokens have the probabilities of the filtered softmax, and the filters equal the logits
processors of transformers.

The noise depends only on (seed, choice, position), so each test draws the same 20,000 tokens on
every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from baton_engine.build import ops_for
from baton_engine.interface import Sample
from baton_engine.layers.ops import Ops
from baton_engine.sampling.metadata import draws_of
from baton_protocol.sampling import SamplingParams
from tests.support.engines.sampling import shaped_logits
from tests.support.needs import needs

DRAWS = 20_000
VOCAB = 60
# A correct sampler fails a test at this level for one in 1,000 choices of seeds. The seeds are
# fixed.
LEVEL = 1e-3
FEWEST_EXPECTED = 5  # draws expected in a cell; with fewer the statistic is not chi-square
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(8)) * 1.5
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.8},
    "top-k": {"top_k": 12},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all filters": {"temperature": 1.2, "min_p": 0.02, "top_k": 30, "top_p": 0.9},
}
Keys = Callable[[int], tuple[int, int, int]]  # number of a draw -> seed, choice, position
KEYS: dict[str, Keys] = {
    "positions": lambda draw: (11, 0, draw),
    "choices": lambda draw: (11, draw, 5),
    "seeds": lambda draw: (draw, 0, 5),
}
OPS = ["torch", pytest.param("triton", marks=pytest.mark.gpu)]


def ops_of(kernels: str) -> tuple[Ops, torch.device]:
    if kernels == "triton":
        needs("gpu")
        return ops_for("triton"), torch.device("cuda")
    return ops_for("torch"), torch.device("cpu")


def counts_of(kernels: str, values: dict[str, Any], keys: Keys) -> torch.Tensor:
    """The number of times that each token is drawn."""
    ops, device = ops_of(kernels)
    drawn = [keys(draw) for draw in range(DRAWS)]
    samples = [
        Sample(choice, position, SamplingParams(seed=seed, **values))
        for seed, choice, position in drawn
    ]
    ids = ops.draw(LOGITS.to(device).expand(DRAWS, VOCAB), draws_of(samples, device))
    return ids.bincount(minlength=VOCAB).cpu()


def probabilities(values: dict[str, Any]) -> torch.Tensor:
    return shaped_logits(LOGITS[None].clone(), [SamplingParams(**values)])[0].double().softmax(-1)


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The p-value of Pearson's chi-square test. Rare tokens share a cell. That cell is left out if
    fewer than FEWEST_EXPECTED draws are expected in it."""
    rare = expected < FEWEST_EXPECTED
    cells = [(counts[~rare].double(), expected[~rare])]
    if expected[rare].sum() >= FEWEST_EXPECTED:
        cells.append((counts[rare].sum()[None].double(), expected[rare].sum()[None]))
    observed, predicted = (torch.cat(parts) for parts in zip(*cells, strict=True))
    statistic = ((observed - predicted).square() / predicted).sum()
    freedom = torch.tensor((len(predicted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("kernels", OPS)
@pytest.mark.parametrize("name", PARAMS)
def test_draws_have_the_probabilities_of_the_filtered_softmax(name: str, kernels: str) -> None:
    counts = counts_of(kernels, PARAMS[name], KEYS["positions"])
    expected = probabilities(PARAMS[name])
    assert not counts[expected == 0].any()
    assert p_value(counts, expected * DRAWS) > LEVEL


@pytest.mark.parametrize("kernels", OPS)
@pytest.mark.parametrize("name", KEYS)
def test_positions_choices_and_seeds_all_draw_from_the_softmax(name: str, kernels: str) -> None:
    counts = counts_of(kernels, PARAMS["all filters"], KEYS[name])
    assert p_value(counts, probabilities(PARAMS["all filters"]) * DRAWS) > LEVEL


def test_the_statistic_detects_a_temperature_that_is_wrong_by_5_percent() -> None:
    counts = counts_of("torch", {"temperature": 1.05}, KEYS["positions"])
    assert p_value(counts, probabilities({}) * DRAWS) < LEVEL


def reference(logits_QV: torch.Tensor, values: dict[str, Any]) -> torch.Tensor:
    """The result of transformers' processors, in the order of our filters."""
    from transformers.generation import logits_process as theirs

    processors: Sequence[tuple[str, Callable[[Any], Any]]] = [
        ("temperature", theirs.TemperatureLogitsWarper),
        ("min_p", theirs.MinPLogitsWarper),
        ("top_k", theirs.TopKLogitsWarper),
        ("top_p", theirs.TopPLogitsWarper),
    ]
    ids = torch.zeros(len(logits_QV), 1, dtype=torch.int64)
    for name, processor in processors:
        if name in values:
            logits_QV = processor(values[name])(ids, logits_QV)
    return logits_QV


@pytest.mark.parametrize("vocab", [7, 500, 5000])
@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.3},
        {"temperature": 1.9},
        {"top_k": 1},
        {"top_k": 6},
        {"top_p": 0.1},
        {"top_p": 0.5},
        {"top_p": 0.97},
        {"min_p": 0.01},
        {"min_p": 0.4},
        {"temperature": 1.4, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
    ],
    ids=str,
)
def test_filters_equal_the_reference_processors(values: dict[str, Any], vocab: int) -> None:
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    expected = reference(logits.clone(), values)
    actual = shaped_logits(logits.clone(), [SamplingParams(**values)] * len(logits))
    assert torch.equal(actual == -math.inf, expected == -math.inf)
    torch.testing.assert_close(actual.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)
