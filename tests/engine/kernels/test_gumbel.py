"""The sampling kernels: their noise, filters and ids equal those of the torch sampler."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import KernelInterface

from baton_engine.interface import Sample
from baton_engine.sampling.gumbel import W_MAX, gumbel, random_bits
from baton_engine.sampling.metadata import MASS_ROUNDING, draws_of
from baton_engine.sampling.sampler import draw
from baton_engine.sampling.triton_gumbel import gumbel_noise, noise_bits
from baton_engine.sampling.triton_sampler import DRAW_TILE, choose_tokens
from baton_engine.sampling.triton_topk_topp import PROGRAMS, TILE, shape
from baton_protocol.sampling import SamplingParams
from tests.support.engines.kernels import DEVICE, noise, poisoned
from tests.support.engines.sampling import noise_keys, shaped_logits

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
    "many": SamplingParams(seed=13, top_k=300, top_p=0.97),
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


def limits(
    logits_SV: torch.Tensor, samples: list[Sample], programs: int = PROGRAMS
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' edge and last token of each sample."""
    edge = torch.full((len(samples),), torch.nan, device=DEVICE)
    last = torch.full((len(samples),), -7, dtype=torch.int32, device=DEVICE)
    shape(logits_SV, draws_of(samples, DEVICE), edge, last, programs)
    return edge, last


def kept_tokens(logits_SV: torch.Tensor, samples: list[Sample]) -> torch.Tensor:
    """Mask [S, V] of the tokens that pass the filters, from the kernels' two outputs as the draw
    kernel reads them. The samples are not greedy."""
    edge, last = limits(logits_SV, samples)
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
    """All logits are equal and top_p is 0.5. The last kept token lies in the second tile."""
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


def certain_tokens(logits_V: torch.Tensor, sample: Sample) -> torch.Tensor:
    """Mask [V] of the tokens for which the mass of likelier tokens is not so close to top_p that
    the rounding of float32 decides whether they stay."""
    others = msgspec.structs.replace(sample.params, top_p=1.0)
    shaped_V = shaped_logits(logits_V[None].clone(), [others])[0].double()
    mass_V, order_V = shaped_V.softmax(-1).sort(descending=True, stable=True)
    before_V = mass_V.cumsum(-1) - mass_V
    top_p = sample.params.top_p if sample.params.top_p < 1 else math.inf
    certain_V = (before_V - (top_p - MASS_ROUNDING)).abs() > MASS_ROUNDING
    return torch.empty_like(certain_V).scatter_(0, order_V, certain_V)


LARGE = [] if DEVICE.type == "cuda" else [pytest.mark.long]  # takes seconds without a GPU
SEVERAL = ["plain", "top-k", "top-p", "top-p of nearly all", "all filters", "many", "min-p"]
ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    "noise": lambda vocab: noise(1, vocab) * 2,
    "a few likely tokens": lambda vocab: noise(1, vocab) * (1 + 9 * (noise(1, vocab, seed=1) > 3)),
    "many ties": lambda vocab: (noise(1, vocab) * 2).round(),
    "all equal": lambda vocab: torch.full((1, vocab), -3.25, device=DEVICE),
    "a grammar's 40 tokens": lambda vocab: noise(1, vocab).index_fill(
        *(1, torch.arange(40, vocab, device=DEVICE), -math.inf)
    ),
}


# Rows whose limits several tiles must find together.
ACROSS_TILES = ("a few likely tokens", "many ties")


@pytest.mark.parametrize(
    ("vocab", "row"),
    [
        pytest.param(
            vocab,
            row,
            marks=LARGE if vocab > 3 * TILE or (vocab > TILE and row not in ACROSS_TILES) else [],
        )
        for vocab in (1000, 2 * TILE + 907, 32_003, 151_936)
        for row in ROWS
    ],
)
def test_rows_of_one_batch_are_filtered_by_their_own_parameters(vocab: int, row: str) -> None:
    logits = ROWS[row](vocab).expand(len(SEVERAL), vocab).contiguous()
    samples = samples_of(*SEVERAL)
    expected = shaped_logits(logits.clone(), [each.params for each in samples]) > -math.inf
    actual = kept_tokens(logits, samples) & (logits > -math.inf)
    certain = torch.stack(
        [certain_tokens(row_V, each) for row_V, each in zip(logits, samples, strict=True)]
    )
    assert torch.equal(actual & certain, expected & certain)
    assert certain.double().mean() > 0.98


@pytest.mark.parametrize("programs", [3, 3 * 2])
def test_limits_do_not_depend_on_the_number_of_programs_or_on_other_rows(programs: int) -> None:
    """Of three tiles a program reads three, one or two, or, in a batch of one row, one. The edges
    have ties, some of which must go."""
    vocab = 2 * TILE + 77
    logits = (noise(3, vocab) * 2).round()
    samples = samples_of("top-p", "many", "all filters")
    edge, last = limits(logits, samples, programs)
    for row, each in enumerate(samples):
        alone = limits(logits[row : row + 1], [each])
        assert (edge[row].item(), last[row].item()) == (alone[0].item(), alone[1].item())


def test_a_row_without_any_possible_token_takes_id_0_and_changes_no_other_row() -> None:
    samples = samples_of("top-p", "all filters", "top-k", "min-p", "top-p", "plain")
    logits = noise(len(samples), 700)
    expected = draw(logits, draws_of(samples, DEVICE)).tolist()
    logits[:4] = -math.inf
    assert choose_tokens(logits, draws_of(samples, DEVICE)).tolist() == [0] * 4 + expected[4:]


@dataclass(frozen=True)
class Launch:
    kernel: str
    programs: int
    rows_bytes: int  # of the histograms, for all rows


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Kernels are not run, but their launches are recorded."""
    found: list[Launch] = []

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*args: Any, **options: Any) -> None:
            words = max(each.nbytes for each in args if getattr(each, "dtype", 0) is torch.int64)
            found.append(Launch(kernel.__name__, math.prod(grid), words))

        return record

    with mock.patch.object(KernelInterface, "__getitem__", launch):
        yield found


SEARCHES: dict[str, list[str]] = {
    "min-p": ["_count", "_limits"],
    "top-k": ["_count"] * 3 + ["_limits"],
    "top-p": ["_count"] + ["_weigh"] * 3 + ["_count_ties", "_limits"],
    "all filters": ["_count"] * 3 + ["_weigh"] * 3 + ["_count_ties", "_limits"],
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("samples", [1, 256])
def test_filters_take_a_few_launches_that_fill_a_gpu_also_with_one_row(
    name: str, samples: int
) -> None:
    """An H100 has 132 multiprocessors, each of which runs up to eight of these programs at a time.
    Only the last kernel has one program per row."""
    logits = torch.empty(samples, 151_936, device=DEVICE)
    with recorded() as found:
        limits(logits, samples_of(*["plain"] * (samples - 1), name))
    assert [each.kernel for each in found] == SEARCHES[name]
    assert found[-1].programs == samples
    assert all(132 <= each.programs <= 2 * 8 * 132 for each in found[:-1])
    assert all(each.rows_bytes < samples * 100_000 for each in found)


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
