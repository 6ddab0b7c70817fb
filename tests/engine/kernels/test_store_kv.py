"""The kernel that stores K and V without a rotation, against its definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton_engine.attention.triton_store_kv import store_kv
from baton_engine.kv.eight_bits import rounded
from tests.support.engines.kernels import DEVICE, DTYPES, can_compute, noise
from tests.support.engines.small_pool import slots_in

LAYERS, BLOCK = 3, 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 24), (2, 32), (4, 128)])
def test_tokens_are_stored_in_their_slots_and_nothing_else_is_written(
    kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    can_compute(dtype)
    pool = noise(6, LAYERS, 2, kv_heads, BLOCK, dim, dtype=dtype)
    expected = pool.clone()
    slots = [3 * BLOCK + 5, 16, 5 * BLOCK + 15, -1, 31]  # the fourth token is not stored
    # Slices of a wider tensor, as a model's projections give them.
    qkv = noise(len(slots), 3 * kv_heads, dim, dtype=dtype, seed=1)
    k_TKH, v_TKH = qkv[:, kv_heads : 2 * kv_heads], qkv[:, 2 * kv_heads :]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // BLOCK, 1, 0, :, slot % BLOCK] = k_TKH[token]
            expected[slot // BLOCK, 1, 1, :, slot % BLOCK] = v_TKH[token]
    store_kv(slots_in(pool, 1, torch.tensor(slots, device=DEVICE)), k_TKH, v_TKH)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("dim", [24, 64])
def test_tokens_are_rounded_when_they_are_stored(dim: int) -> None:
    """Numbers of all sizes, zeros, and a row that is not finite."""
    k_TKH = noise(4, 2, dim) * torch.exp2(noise(4, 2, dim, seed=1) * 9)
    v_TKH = noise(4, 2, dim, seed=2) * torch.tensor([1e-30, 1e30]).to(DEVICE)[:, None]
    k_TKH[1, 0], v_TKH[2, 1, 5] = 0.0, torch.inf
    pool = torch.zeros(1, 1, 2, 2, BLOCK, dim, device=DEVICE)
    slots = slots_in(pool, 0, torch.arange(4, device=DEVICE))
    store_kv(replace(slots, rounds=True), k_TKH, v_TKH)
    for kept, given in ((pool[0, 0, 0], k_TKH), (pool[0, 0, 1], v_TKH)):
        expected = rounded(given).transpose(0, 1)
        assert torch.equal(kept[:, :4].nan_to_num(), expected.nan_to_num())
        assert torch.equal(kept[:, :4].isnan(), expected.isnan())
