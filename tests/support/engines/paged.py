"""Cases of paged attention that expose a kernel's mistakes.

In: rows as (start, tokens). Out: queries, a pool that holds NaN wherever no row may read, and
attention computed from its definition.

Shapes: T tokens, K kv heads, H head_dim, B block size, P blocks of the pool.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_engine.attention.layer_kv import LayerKV
from baton_engine.attention.triton_paged_attention import StepRows
from tests.support.engines.attention_specs import sinks_of
from tests.support.engines.kernels import DEVICE
from tests.support.engines.small_pool import attention_of

# Absolute and relative tolerances against float64.
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPARE_BLOCKS = 3  # blocks that belong to no row

Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case. `spans` are rows as (start, tokens); `heads` are the numbers of query heads and of
    kv heads; `window` is in tokens; with `sinks`, each query head has one. Heads of v have
    `value_dim` numbers, by default `dim`; if they are `latent`, these are the first numbers of
    k."""

    spans: Spans
    heads: tuple[int, int] = (4, 2)
    dim: int = 32
    block: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    value_dim: int | None = None
    latent: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class Inputs:
    q_TNH: torch.Tensor
    kv: LayerKV
    rows: StepRows
    expected_TNH: torch.Tensor  # float64, on the CPU
    sinks_N: torch.Tensor | None = None


def make_inputs(case: Case) -> Inputs:
    """Make a case's tensors. Rows have their own blocks, scattered over the pool. NaN fills the
    slots after a row's end in its last block, the spare blocks, and block 0, which pads the table.
    """
    (heads, kv_heads), noise = case.heads, torch.Generator().manual_seed(1)
    lengths = [start + tokens for start, tokens in case.spans]
    used = [-(-length // case.block) for length in lengths]
    free = list(range(1, 1 + sum(used) + SPARE_BLOCKS))
    random.Random(0).shuffle(free)
    value_dim = case.value_dim or case.dim
    kept = (case.dim,) if case.latent else (case.dim, value_dim)
    pool = torch.full((len(free) + 1, kv_heads * case.block * sum(kept)), torch.nan).to(case.dtype)
    pages = pages_of(pool, kept, kv_heads, case.block)
    table = torch.zeros(len(lengths), max(used) + 2, dtype=torch.int32)
    tokens = sum(tokens for _, tokens in case.spans)
    # A slice of a wider tensor, as a model's projections give it.
    q = torch.randn(tokens, heads + kv_heads, case.dim, generator=noise).to(case.dtype)[:, :heads]
    sinks_N = sinks_of(heads, DEVICE) if case.sinks else None
    expected, begin = [], 0
    for line, (start, count) in enumerate(case.spans):
        whole = [
            torch.randn(kv_heads, lengths[line], size, generator=noise).to(case.dtype)
            for size in kept
        ]
        for index in range(used[line]):
            table[line, index] = free.pop()
            for each, kv_KSH in zip(pages, whole, strict=True):
                part = kv_KSH[:, index * case.block : (index + 1) * case.block]
                each[table[line, index], :, : part.shape[1]] = part
        k_KSH, v_KSV = whole[0], whole[-1][..., :value_dim]
        queries = q[begin : begin + count]
        expected.append(attention_of(queries, k_KSH, v_KSV, start, case.window, sinks_N))
        begin += count
    starts = torch.tensor([0, *(count for _, count in case.spans)]).cumsum(0).int()
    one_token = all(count == 1 for _, count in case.spans)
    where = (starts.to(DEVICE), torch.tensor(lengths).int().to(DEVICE), table.to(DEVICE))
    pages = pages_of(pool.to(DEVICE), kept, kv_heads, case.block)
    kv = LayerKV(pages[0], pages[-1][..., :value_dim])
    return Inputs(q.to(DEVICE), kv, StepRows(*where, one_token), torch.cat(expected), sinks_N)


def pages_of(
    pool: torch.Tensor, sizes: Sequence[int], kv_heads: int, block: int
) -> list[torch.Tensor]:
    """The views [P, K, B, size] of the parts of a pool [P, numbers of a block]."""
    parts = pool.split_with_sizes([kv_heads * block * size for size in sizes], dim=1)
    return [part.view(len(pool), kv_heads, block, -1) for part in parts]


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)
