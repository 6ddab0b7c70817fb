"""The sampling kernels: their noise, filters and ids equal those of the torch sampler."""

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
    "top-k larger than int32": SamplingParams(seed=5, top_k=10**12),
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
def test_noise_bits_equal_those_of_torch_and_its_floats_are_as_accurate(seed: int) -> None:
    tokens = 8192
    keys = noise_keys(seed, 1, 2)
    a, b = torch.tensor(keys, device=DEVICE).to(torch.int32).chunk(2)
    bits = torch.empty(tokens, dtype=torch.int32, device=DEVICE)
    actual = torch.empty(tokens, device=DEVICE)
    store_noise[(1,)](bits, actual, a, b, TOKENS=tokens)
    assert torch.equal(bits, random_bits([keys], tokens, DEVICE)[0])
    w = ((bits.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    exact = -(-torch.log1p(-w.clamp(max=W_MAX).double())).log()
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(actual, gumbel([keys], tokens, DEVICE)[0], rtol=1e-6, atol=1e-6)


def kept_tokens(logits_SV: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    """Mask [S, V] of the tokens that pass the filters, from the kernel's two outputs as the draw
    kernel reads them."""
    edge = torch.full((len(samples),), torch.nan, device=DEVICE)
    last = torch.full((len(samples),), -7, dtype=torch.int32, device=DEVICE)
    shape(logits_SV, draws_of(samples, DEVICE), edge, last)
    temperature = torch.tensor([each.params.temperature for each in samples], device=DEVICE)
    x = logits_SV.float() / temperature[:, None]
    tokens = torch.arange(x.shape[1], device=DEVICE)
    on_edge = (x == edge[:, None]) & (tokens[None, :] <= last[:, None])
    return (x > edge[:, None]) | on_edge


@pytest.mark.parametrize("step", [0.0, 0.25], ids=["no ties", "many ties"])
@pytest.mark.parametrize("name", FILTERED)
def test_the_filters_keep_the_same_tokens_as_in_torch(name: str, step: float) -> None:
    logits = noise(1, VOCAB, seed=len(name)) * 2
    if step:
        logits = (logits / step).round() * step
    samples = samples_of(name)
    expected = shaped_logits(logits.clone(), [PARAMS[name]]) > -math.inf
    actual = kept_tokens(logits, samples)
    assert torch.equal(actual, expected)
    assert bool(actual.any())


def test_of_tied_tokens_at_the_threshold_those_with_the_lowest_ids_are_kept() -> None:
    """All logits are equal and top_p is 0.5. The last kept token lies in the second tile of a
    program."""
    vocab = 2 * TILE + 900
    logits = torch.zeros(1, vocab, device=DEVICE)
    actual = kept_tokens(logits, [Sample(0, 0, SamplingParams(top_p=0.5))])
    assert actual[0].nonzero()[:, 0].tolist() == list(range(vocab // 2))


def test_tokens_with_a_logit_of_minus_infinity_are_not_counted_or_kept() -> None:
    logits = noise(1, 300)
    logits[0, 100:] = -math.inf
    samples = [Sample(0, 0, SamplingParams(top_k=250, top_p=0.99))]
    expected = shaped_logits(logits.clone(), [samples[0].params]) > -math.inf
    actual = kept_tokens(logits, samples) & (logits > -math.inf)
    assert torch.equal(actual, expected)


def test_ids_equal_those_of_the_torch_sampler() -> None:
    """The rows are slices of a wider buffer that holds NaN after each row."""
    samples = samples_of(*PARAMS)
    buffer = torch.full((len(samples), VOCAB + 100), torch.nan, device=DEVICE)
    logits = buffer[:, :VOCAB]
    logits.copy_(noise(len(samples), VOCAB) * 2)
    with poisoned():
        actual = choose_tokens(logits, draws_of(samples, DEVICE))
    assert actual.tolist() == draw(logits, draws_of(samples, DEVICE)).tolist()


def test_sampled_ids_equal_those_of_the_torch_sampler_at_many_positions() -> None:
    count, vocab = 40, DRAW_TILE + 100
    logits = noise(1, vocab).expand(count, vocab)
    samples = [Sample(0, position, SamplingParams(seed=5)) for position in range(count)]
    actual = choose_tokens(logits, draws_of(samples, DEVICE)).tolist()
    assert actual == draw(logits, draws_of(samples, DEVICE)).tolist()
    assert len(set(actual)) > count // 2


@pytest.mark.parametrize("best", [0, DRAW_TILE - 1, DRAW_TILE, DRAW_TILE + 499])
def test_a_greedy_sample_takes_the_largest_logit_at_any_position(best: int) -> None:
    logits = noise(1, DRAW_TILE + 500)
    logits[0, best] = 50.0
    assert choose_tokens(logits, draws_of(samples_of("greedy"), DEVICE)).tolist() == [best]


def test_a_greedy_sample_takes_the_lowest_id_of_equal_logits() -> None:
    logits = torch.zeros(1, 2 * DRAW_TILE, device=DEVICE)
    logits[0, [900, DRAW_TILE + 3]] = 1.0
    assert choose_tokens(logits, draws_of(samples_of("greedy"), DEVICE)).tolist() == [900]
