"""QK-norm, rope and the store of K and V in one kernel, against torch; and kept rope tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from baton_engine.attention.interface import KVSlots
from baton_engine.attention.layer_kv import layers_kv
from baton_engine.config.model_config import RopeConfig
from baton_engine.kv.eight_bits import encoded, rounded
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.layers.ops import TORCH_OPS
from baton_engine.layers.rotary import HeadNorm, Rope, RopeTables
from baton_engine.layers.triton_rope_store import rotate_store
from baton_protocol.layout import CODES
from tests.support.engines.attention_specs import specs_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.kernels import (
    DEVICE,
    DTYPES,
    CountedLaunches,
    assert_close,
    can_compute,
    noise,
)
from tests.support.engines.small_pool import slots_in

LAYERS, BLOCK, BLOCKS = 3, 4, 9
LAYER = 1
# (query heads, kv heads, dim). The last two shapes need several programs per token.
SHAPES = [(4, 4, 32), (8, 2, 96), (5, 1, 64), (5, 1, 128), (16, 4, 64), (24, 8, 128)]
POSITIONS = [0, 7, 33, 1000, 2]
# The slot of each token, scattered over the pool. The last token is not stored.
SLOTS = [5, 35, 16, 19, -1]


@dataclass
class RecordingAttention:
    """The attention of a step that records its arguments q, k and v."""

    pool: torch.Tensor
    arguments: list[torch.Tensor] = field(default_factory=list)

    def slots(self, layer: int) -> KVSlots:
        assert layer == LAYER
        return slots_of(self.pool)

    def attend(
        self,
        layer: int,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKV: torch.Tensor | None,
        *,
        stored: bool = False,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert v_TKV is not None
        self.arguments = [q_TNH, k_TKH, v_TKV]
        return q_TNH


def tables(dim: int, dtype: torch.dtype, partial: float = 1.0) -> RopeTables:
    rope = Rope(RopeConfig(type="default", theta=1e4, partial=partial), dim, dtype, DEVICE)
    return rope.tables(torch.tensor(POSITIONS, device=DEVICE))


ROPES = {
    "plain": RopeConfig(type="default", theta=1e4),
    "a part of the head": RopeConfig(type="default", theta=1e4, partial=0.75),
    "llama3": RopeConfig(
        type="llama3", theta=5e5, factor=8.0, high_freq_factor=4.0, original_max_positions=128
    ),
    "longrope": RopeConfig(
        type="longrope",
        theta=1e4,
        attention_factor=1.19,
        short_factors=tuple(1.0 + index / 8 for index in range(16)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ROPES)
def test_kept_rope_tables_have_the_bits_of_computed_ones_and_are_read_with_one_launch(
    name: str, dtype: torch.dtype
) -> None:
    positions = torch.tensor([0, 9999, 7, 8192, 8191, 7], dtype=torch.int32, device=DEVICE)
    rope = Rope(ROPES[name], 32, dtype, DEVICE)
    computed = rope.tables(positions)
    rope.keep(10_000)
    with CountedLaunches() as launches:
        kept = rope.tables(positions)
    assert [torch.equal(*each) for each in zip(kept, computed, strict=True)] == [True, True]
    assert kept[0].shape == computed[0].shape
    assert launches.names == ["index_select.default"]


def test_rope_tables_of_too_many_positions_are_not_kept() -> None:
    """131,072 positions of 128 numbers in float32 are 64 MiB."""
    positions = torch.tensor([1 << 20], device=DEVICE)
    rope = Rope(ROPES["plain"], 128, torch.float32, DEVICE)
    computed = rope.tables(positions)
    rope.keep((1 << 20) + 1)
    assert torch.equal(rope.tables(positions)[0], computed[0])
    with CountedLaunches() as launches:
        rope.tables(positions)
    assert len(launches.names) > 1


@pytest.mark.parametrize("name", ["plain", "a part of the head"])
def test_heads_are_rotated_alike_by_kept_and_by_computed_tables(name: str) -> None:
    rope, results = Rope(ROPES[name], 32, torch.float32, DEVICE), []
    positions = torch.tensor(POSITIONS, device=DEVICE)
    for kept in (False, True):
        if kept:
            rope.keep(2000)
        heads, pool = noise(len(POSITIONS), 8, 32), pool_of(2, 32, torch.float32)
        rotate_store(heads, 4, None, rope.tables(positions), slots_of(pool))
        results.append((heads, pool.nan_to_num()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def pool_of(kv_heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool full of NaN."""
    shape = (BLOCKS, LAYERS, 2, kv_heads, BLOCK, dim)
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


def slots_of(pool: torch.Tensor) -> KVSlots:
    return slots_in(pool, LAYER, torch.tensor(SLOTS, device=DEVICE))


def check(
    n: int, k: int, dim: int, dtype: torch.dtype, norm: HeadNorm | None, partial: float = 1.0
) -> None:
    """rotate_store() changes q and k in place like torch, and stores K and V and nothing else in
    the pool."""
    rope, pool = tables(dim, dtype, partial), pool_of(k, dim, dtype)
    heads = noise(len(POSITIONS), n + 2 * k, dim, dtype=dtype)
    expected = RecordingAttention(pool_of(k, dim, dtype))
    TORCH_OPS.attend(heads.clone(), n, norm, rope, LAYER, expected)
    q_TNH, k_TKH, v_TKH = expected.arguments
    rotate_store(heads, n, norm, rope, slots_of(pool))
    assert_close(heads[:, :n], q_TNH)
    assert_close(heads[:, n : n + k], k_TKH)
    assert torch.equal(heads[:, n + k :], v_TKH)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            block, offset = divmod(slot, BLOCK)
            stored = pool[block, LAYER, :, :, offset]
            assert torch.equal(stored, heads[token, n:].view(2, k, dim))
            pool[block, LAYER, :, :, offset] = torch.nan
    assert bool(pool.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "dim"), SHAPES)
def test_rotated_heads_and_the_pool_equal_those_of_torch(
    n: int, k: int, dim: int, dtype: torch.dtype
) -> None:
    can_compute(dtype)
    check(n, k, dim, dtype, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "dim"), SHAPES[1:5:2])
def test_heads_are_normalised_before_they_are_rotated(
    n: int, k: int, dim: int, dtype: torch.dtype
) -> None:
    can_compute(dtype)
    check(n, k, dim, dtype, HeadNorm(noise(n + k, dim, dtype=dtype, seed=4), 1e-6))


@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("n", "k", "dim"), SHAPES[1:4])
@pytest.mark.parametrize("partial", [0.75, 0.25])
def test_a_part_of_each_head_is_rotated(
    n: int, k: int, dim: int, partial: float, with_norm: bool
) -> None:
    norm = HeadNorm(noise(n + k, dim, seed=4), 1e-6) if with_norm else None
    check(n, k, dim, torch.float32, norm, partial)


@pytest.mark.parametrize(("n", "k", "dim"), SHAPES[:2])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_heads_are_rounded_when_they_are_stored(n: int, k: int, dim: int, partial: float) -> None:
    heads, pool = noise(len(POSITIONS), n + 2 * k, dim), pool_of(k, dim, torch.float32)
    slots = replace(slots_of(pool), rounds=True)
    rotate_store(heads, n, None, tables(dim, torch.float32, partial), slots)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            stored = pool[slot // BLOCK, LAYER, :, :, slot % BLOCK]
            assert torch.equal(stored, rounded(heads[token, n:]).view(2, k, dim))


def test_kv_is_stored_at_pool_offsets_beyond_int32() -> None:
    """The pool has 2^31 numbers before its last block. Only the pages that are written take
    memory."""
    dim, kv_heads = 64, 1
    numbers = LAYERS * 2 * kv_heads * BLOCK * dim
    blocks = 2**31 // numbers + 2
    # torch.zeros would touch every page.
    zeros = np.zeros((blocks, LAYERS, 2, kv_heads, BLOCK, dim), np.float16)
    pool = torch.from_numpy(zeros).to(DEVICE)
    slots = slots_in(pool, LAYERS - 1, torch.tensor([blocks * BLOCK - 1], device=DEVICE))
    heads = noise(1, 4, dim, dtype=torch.float16)
    cos_T1H, sin_T1H = tables(dim, torch.float16)
    rotate_store(heads, 2, None, (cos_T1H[:1], sin_T1H[:1]), slots)
    assert torch.equal(pool[-1, -1, :, 0, -1], heads[0, 2:])


def test_an_infinite_value_is_stored_unchanged() -> None:
    """A rotation by 1 and 0 of v, or of what partial rope leaves alone, would turn infinity into
    NaN."""
    pool = pool_of(1, 32, torch.float32)
    heads = noise(len(POSITIONS), 3, 32)
    heads[:, 2, 5] = heads[:, 1, 30] = torch.inf
    rotate_store(heads, 1, None, tables(32, torch.float32, 0.75), slots_of(pool))
    block, offset = divmod(SLOTS[0], BLOCK)
    assert torch.equal(pool[block, LAYER, :, 0, offset], heads[0, 1:])
    assert bool(heads[0, 1].isinf().sum() == 1)
    assert not bool(heads.isnan().any())


@pytest.mark.parametrize("code", CODES)
def test_heads_are_stored_as_codes(code: str) -> None:
    n, k, dim = 4, 2, 24
    layout = kv_layout(layers=2, heads=k, dim=dim, block=BLOCK).in_dtype(code)
    memory, tokens = TorchMemory(layout, BLOCKS - 1, DEVICE), len(POSITIONS)
    memory.pool.fill_(77)
    before = memory.pool.clone()
    [_, kv] = layers_kv(memory, specs_of(layout, n))
    assert kv.exponents is not None
    slots = KVSlots(kv.k_PKBH, kv.v_PKBV, torch.tensor(SLOTS, device=DEVICE), kv.exponents)
    heads = noise(tokens, n + 2 * k, dim, dtype=torch.float32)
    rotate_store(heads, n, None, tables(dim, torch.float32, 1.0), slots)
    both = (kv.k_PKBH, kv.exponents.k_PKB1), (kv.v_PKBV, kv.exponents.v_PKB1)
    for first, fields in zip((n, n + k), both, strict=True):
        found = encoded(heads[:, first : first + k], kv.k_PKBH.dtype)
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                for field, expected in zip(fields, found, strict=True):
                    place = field[slot // BLOCK, :, slot % BLOCK].view(torch.int8)
                    assert torch.equal(place, expected[token].view(torch.int8))
                    place.fill_(77)
    assert torch.equal(memory.pool, before)
