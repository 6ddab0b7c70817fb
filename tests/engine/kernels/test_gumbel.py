"""Sampling by kernels: the noise of noise.py, and the sets and ids of the torch sampler."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from baton_engine.interface import Sample
from baton_engine.sampling.gumbel import W_MAX, gumbel, noise_keys, random_bits
from baton_engine.sampling.metadata import draws_of
from baton_engine.sampling.sampler import draw, shaped_logits
from baton_engine.sampling.triton_gumbel import gumbel_noise, noise_bits
from baton_engine.sampling.triton_sampler import DRAW_TILE, choose_tokens
from baton_engine.sampling.triton_topk_topp import TILE, shape
from baton_protocol.sampling import SamplingParams
from tests.support.engines.kernels import DEVICE, noise, poisoned

VOCAB = TILE + 476
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "plain": SamplingParams(seed=1),
    "hot": SamplingParams(seed=2, temperature=1.7),
    "top-k": SamplingParams(seed=3, temperature=0.7, top_k=5),
    "top-1": SamplingParams(seed=4, top_k=1),
    "top-k of all": SamplingParams(seed=5, top_k=VOCAB),
    "top-k of more than int32 counts": SamplingParams(seed=5, top_k=10**12),
    "top-p": SamplingParams(seed=6, top_p=0.9),
    "top-p of nearly all": SamplingParams(seed=7, temperature=1.3, top_p=0.999),
    "top-p of one": SamplingParams(seed=8, top_p=1e-9),
    "min-p": SamplingParams(seed=9, min_p=0.1),
    "min-p of one": SamplingParams(seed=10, min_p=1.0),
    "all filters": SamplingParams(seed=-11, min_p=0.02, top_k=50, top_p=0.5, temperature=0.9),
    "top-k beyond min-p": SamplingParams(seed=12, min_p=0.5, top_k=400),
}
FILTERED = [name for name in PARAMS if name not in ("greedy", "plain", "hot")]


def samples_of(*names: str) -> list[Sample]:
    return [Sample(at % 3, 1000 * at, PARAMS[name]) for at, name in enumerate(names)]


@triton.jit  # type: ignore[untyped-decorator]
def store_noise(
    bits_ptr: tl.tensor, noise_ptr: tl.tensor, a: tl.tensor, b: tl.tensor, TOKENS: tl.constexpr
) -> None:
    token = tl.arange(0, TOKENS)
    bits = noise_bits(tl.load(a), tl.load(b), token)
    tl.store(bits_ptr + token, bits.to(tl.int32, bitcast=True))
    tl.store(noise_ptr + token, gumbel_noise(tl.load(a), tl.load(b), token))


@pytest.mark.parametrize("seed", [0, 7, -1, 2**62])
def test_the_bits_are_those_of_the_torch_noise_and_the_floats_as_exact(seed: int) -> None:
    tokens = 8192
    keys = noise_keys(seed, 1, 2)
    a, b = torch.tensor(keys, device=DEVICE).to(torch.int32).chunk(2)
    bits = torch.empty(tokens, dtype=torch.int32, device=DEVICE)
    found = torch.empty(tokens, device=DEVICE)
    store_noise[(1,)](bits, found, a, b, TOKENS=tokens)
    assert torch.equal(bits, random_bits([keys], tokens, DEVICE)[0])
    w = ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    exact = -(-torch.log1p(-w.clamp(max=W_MAX).double())).log()
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, gumbel([keys], tokens, DEVICE)[0], rtol=1e-6, atol=1e-6)


def stays(logits_SV: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    """What the kernel's two numbers say, as the draw reads them."""
    edge = torch.full((len(samples),), torch.nan, device=DEVICE)
    last = torch.full((len(samples),), -7, dtype=torch.int32, device=DEVICE)
    shape(logits_SV, draws_of(samples, DEVICE).columns_6S, edge, last)
    temperature = torch.tensor([each.params.temperature for each in samples], device=DEVICE)
    x = logits_SV.float() / temperature[:, None]
    tokens = torch.arange(x.shape[1], device=DEVICE)
    on_edge = (x == edge[:, None]) & (tokens[None, :] <= last[:, None])
    return (x > edge[:, None]) | on_edge


@pytest.mark.parametrize("step", [0.0, 0.25], ids=["no ties", "many ties"])
@pytest.mark.parametrize("name", FILTERED)
def test_what_stays_is_what_stays_in_torch(name: str, step: float) -> None:
    logits = noise(1, VOCAB, seed=len(name)) * 2
    if step:
        logits = (logits / step).round() * step
    samples = samples_of(name)
    expected = shaped_logits(logits.clone(), [PARAMS[name]]) > -math.inf
    found = stays(logits, samples)
    assert torch.equal(found, expected)
    assert bool(found.any())


def test_of_equal_tokens_on_the_edge_those_with_the_lowest_ids_stay() -> None:
    """Half the mass of a flat row; its middle lies in the second tile that a program reads."""
    vocab = 2 * TILE + 900
    logits = torch.zeros(1, vocab, device=DEVICE)
    found = stays(logits, [Sample(0, 0, SamplingParams(top_p=0.5))])
    assert found[0].nonzero()[:, 0].tolist() == list(range(vocab // 2))


def test_banned_tokens_neither_count_nor_stay() -> None:
    logits = noise(1, 300)
    logits[0, 100:] = -math.inf
    samples = [Sample(0, 0, SamplingParams(top_k=250, top_p=0.99))]
    expected = shaped_logits(logits.clone(), [samples[0].params]) > -math.inf
    found = stays(logits, samples) & (logits > -math.inf)
    assert torch.equal(found, expected)


def test_ids_are_those_of_the_torch_sampler() -> None:
    """Rows lie in a wider buffer, and what stands behind them is NaN."""
    samples = samples_of(*PARAMS)
    buffer = torch.full((len(samples), VOCAB + 100), torch.nan, device=DEVICE)
    logits = buffer[:, :VOCAB]
    logits.copy_(noise(len(samples), VOCAB) * 2)
    with poisoned():
        found = choose_tokens(logits, draws_of(samples, DEVICE))
    assert found.tolist() == draw(logits, draws_of(samples, DEVICE)).tolist()


def test_drawn_ids_are_those_of_the_torch_sampler_over_many_positions() -> None:
    count, vocab = 40, DRAW_TILE + 100
    logits = noise(1, vocab).expand(count, vocab)
    samples = [Sample(0, position, SamplingParams(seed=5)) for position in range(count)]
    found = choose_tokens(logits, draws_of(samples, DEVICE)).tolist()
    assert found == draw(logits, draws_of(samples, DEVICE)).tolist()
    assert len(set(found)) > count // 2


@pytest.mark.parametrize("best", [0, DRAW_TILE - 1, DRAW_TILE, DRAW_TILE + 499])
def test_a_greedy_sample_takes_the_largest_logit_wherever_it_stands(best: int) -> None:
    logits = noise(1, DRAW_TILE + 500)
    logits[0, best] = 50.0
    assert choose_tokens(logits, draws_of(samples_of("greedy"), DEVICE)).tolist() == [best]


def test_of_equal_logits_a_greedy_sample_takes_the_lowest_id() -> None:
    logits = torch.zeros(1, 2 * DRAW_TILE, device=DEVICE)
    logits[0, [900, DRAW_TILE + 3]] = 1.0
    assert choose_tokens(logits, draws_of(samples_of("greedy"), DEVICE)).tolist() == [900]
