"""Paged attention with `exact`: the bits of a query's output depend only on the query and its keys.

Outputs are compared as integers, with what the query gets alone, in a step of one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from baton_engine.attention.layer_kv import LayerKV
from baton_engine.attention.triton_paged_attention import (
    FIXED_SPLIT_KEYS,
    StepRows,
    paged_attention,
    tile_shape,
)
from tests.support.engines.attention_specs import sinks_of
from tests.support.engines.kernels import DEVICE, can_compute, noise, poisoned
from tests.support.engines.paged import Case, assert_near, make_inputs

BLOCK, KV_HEADS = 16, 1
LENGTH = 2 * FIXED_SPLIT_KEYS + 70
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@dataclass(frozen=True)
class Prompt:
    """A prompt's queries, and its KV in the blocks of a pool; other blocks hold NaN."""

    q_TNH: torch.Tensor
    pool_P2KBH: torch.Tensor
    blocks: list[int]


def make_prompt(dtype: torch.dtype, heads: int, dim: int) -> Prompt:
    blocks = torch.randperm(-(-LENGTH // BLOCK), generator=torch.Generator().manual_seed(2)) + 1
    pool = torch.full((len(blocks) + 9, 2, KV_HEADS, BLOCK, dim), torch.nan, device=DEVICE).to(
        dtype
    )
    pool[blocks] = noise(len(blocks), 2, KV_HEADS, BLOCK, dim, dtype=dtype, seed=1)
    return Prompt(noise(LENGTH, heads, dim, dtype=dtype), pool, blocks.tolist())


def attend(
    prompt: Prompt,
    spans: list[tuple[int, int]],
    *,
    programs: int = 1,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step: each span (start, tokens) is a row of the prompt. Returns the rows' outputs,
    concatenated."""
    table = [prompt.blocks[: -(-sum(span) // BLOCK)] for span in spans]
    width = max(map(len, table)) + 2
    rows = StepRows(
        torch.tensor([0, *(tokens for _, tokens in spans)]).cumsum(0).int().to(DEVICE),
        torch.tensor([sum(span) for span in spans]).int().to(DEVICE),
        torch.tensor([line + [0] * (width - len(line)) for line in table]).int().to(DEVICE),
        one_token=all(tokens == 1 for _, tokens in spans),
    )
    q_TNH = torch.cat([prompt.q_TNH[start : start + tokens] for start, tokens in spans])
    with poisoned():
        out_TNH = torch.empty_like(q_TNH)
        paged_attention(
            *(q_TNH, LayerKV(prompt.pool_P2KBH[:, 0], prompt.pool_P2KBH[:, 1]), rows, out_TNH),
            programs=programs,
            window=window,
            soft_cap=soft_cap,
            sinks_N=sinks_N,
            exact=True,
        )
    return out_TNH


def bits(values: torch.Tensor) -> list[list[int]]:
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    return values.flatten(1).view(kind).tolist()


# Positions at the ends of tiles, splits and windows.
POSITIONS = [0, 63, 64, 255, 256, 300, 512, LENGTH - 1]
STEPS: dict[str, list[tuple[int, int]]] = {
    "one-token rows": [(position, 1) for position in POSITIONS],
    "pieces of a prompt": [(0, 5), (60, 6), (250, 9), (300, 1), (505, 10), (LENGTH - 4, 4)],
    "other pieces": [(0, 1), (50, 19), (255, 2), (298, 5), (512, 1), (LENGTH - 1, 1)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "soft_cap", "sinks", "heads", "dim"),
    [(None, None, True, 2, 32), (100, None, False, 1, 64), (300, 20.0, True, 3, 24)],
    ids=["sinks", "a window", "a window, a soft cap, sinks and three heads per kv head"],
)
def test_a_query_gets_the_bits_that_it_gets_alone(
    window: int | None,
    soft_cap: float | None,
    sinks: bool,
    heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    can_compute(dtype)
    prompt = make_prompt(dtype, heads, dim)
    limits: dict[str, Any] = {"window": window, "soft_cap": soft_cap}
    sinks_N = sinks_of(heads, DEVICE) if sinks else None
    alone = {
        position: bits(attend(prompt, [(position, 1)], sinks_N=sinks_N, **limits))[0]
        for position in POSITIONS
    }
    for name, spans in STEPS.items():
        for programs in (1, 4):
            outputs = attend(prompt, spans, programs=programs, sinks_N=sinks_N, **limits)
            positions = [at for start, tokens in spans for at in range(start, start + tokens)]
            found = dict(zip(positions, bits(outputs), strict=True))
            different = [at for at in POSITIONS if at in found and found[at] != alone[at]]
            assert not different, f"{name}, {programs} programs: positions {different}"


@pytest.mark.parametrize("programs", [1, 4])
def test_exact_attention_equals_the_definition(programs: int) -> None:
    spans = [(2 * FIXED_SPLIT_KEYS + 4, 1), (FIXED_SPLIT_KEYS - 1, 1), (20, 40), (0, 1)]
    inputs = make_inputs(Case(spans=spans, window=300, sinks=True))
    q_TNH = inputs.q_TNH
    with poisoned():
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=DEVICE)
        paged_attention(
            *(q_TNH, inputs.kv, inputs.rows, out_TNH),
            window=300,
            sinks_N=inputs.sinks_N,
            programs=programs,
            exact=True,
        )
    assert_near(out_TNH, inputs.expected_TNH)


def test_keys_before_a_window_are_not_read() -> None:
    """The blocks of such keys may belong to another request already."""
    prompt, window = make_prompt(torch.float32, 2, 32), 40
    expected = attend(prompt, [(400, 1), (395, 9)], window=window)
    prompt.pool_P2KBH[prompt.blocks[: (395 - window + 1) // BLOCK]] = torch.nan
    assert bits(attend(prompt, [(400, 1), (395, 9)], window=window)) == bits(expected)


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("dim", [8, 64, 80, 128, 256])
def test_tiles_have_one_shape_for_all_rows_and_divide_a_split(dim: int, item_bytes: int) -> None:
    shapes = {tile_shape(each, 4, dim, item_bytes, exact=True) for each in (True, False)}
    [shape] = shapes
    assert FIXED_SPLIT_KEYS % shape.keys == 0
