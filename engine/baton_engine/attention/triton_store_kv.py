"""Store a step's K and V in the pool. Torch twin: `PagedKV.store`.

In: rotated k, and v, and each token's slot. Out: the written pool. Used when no other kernel has
stored K and V (see `triton_rope_store`). A latent layer has no v: k is its whole row.

Shapes: T tokens, K kv heads, H head_dim, V numbers of a head of v (D: the next power of two of
either), B block size, P blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_engine.attention.interface import KVSlots
from baton_engine.attention.triton_codes import as_bytes, is_fp8, stored_row


def store_kv(slots: KVSlots, k_TKH: torch.Tensor, v_TKV: torch.Tensor | None) -> None:
    """Store K and V of one layer. The last dimension of k and v must be contiguous; other strides
    are free."""
    tokens, kv_heads, dim = k_TKH.shape
    k_PKBH, v_PKBV = slots.k_PKBH, slots.v_PKBV
    value_dim = 0 if v_TKV is None else v_TKV.shape[2]
    other = k_TKH if v_TKV is None else v_TKV
    kept = slots.exponents
    exponents = (k_PKBH, v_PKBV, 0)  # not read
    if kept is not None:
        exponents = kept.k_PKB1, kept.v_PKB1, kept.k_PKB1.stride(1)
    _store_kv[(tokens, kv_heads)](
        *(slots.slots_T, k_TKH, k_TKH.stride(0), k_TKH.stride(1)),
        *(other, other.stride(0), other.stride(1)),
        *(as_bytes(k_PKBH, kept), *k_PKBH.stride()[:2]),
        *(as_bytes(v_PKBV, kept), *v_PKBV.stride()[:2], *exponents),
        CODED=kept is not None,
        FP8=is_fp8(k_PKBH),
        BLOCK=k_PKBH.shape[2],
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        VALUE=value_dim,
        VALUE_P=triton.next_power_of_2(max(value_dim, 1)),
        ROUNDS=slots.rounds,
        num_warps=1,
    )


@triton.jit
def _store_kv(
    slots_T: tl.tensor,
    k_TKH: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_TKV: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    k_PKBH: tl.tensor,
    k_block: tl.tensor,
    k_row: tl.tensor,
    v_PKBV: tl.tensor,
    v_block: tl.tensor,
    v_row: tl.tensor,
    k_exponents: tl.tensor,
    v_exponents: tl.tensor,
    exponent_row: tl.tensor,
    CODED: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_P: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_T + token)  # int64: the pool has too many elements for 32-bit offsets
    if slot < 0:
        return
    dim_D = tl.arange(0, DIM_P)
    live_D = dim_D < DIM
    k_D = tl.load(k_TKH + token * k_token + head * k_head + dim_D, mask=live_D, other=0.0)
    place = slot // BLOCK * k_block + head * k_row + slot % BLOCK * DIM
    # Codes and exponents have the same blocks.
    exponent_at = slot // BLOCK * k_block + head * exponent_row + slot % BLOCK
    k_D = stored_row(k_D, k_exponents + exponent_at, CODED, FP8, ROUNDS)
    tl.store(k_PKBH + place + dim_D, k_D, mask=live_D)
    if VALUE > 0:
        value_D = tl.arange(0, VALUE_P)
        live_value_D = value_D < VALUE
        v_ptrs = v_TKV + token * v_token + head * v_head + value_D
        v_D = tl.load(v_ptrs, mask=live_value_D, other=0.0)
        v_D = stored_row(v_D, v_exponents + exponent_at, CODED, FP8, ROUNDS)
        place = slot // BLOCK * v_block + head * v_row + slot % BLOCK * VALUE
        tl.store(v_PKBV + place + value_D, v_D, mask=live_value_D)
