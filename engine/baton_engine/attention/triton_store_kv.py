"""Store a step's K and V in the pool. Torch twin: `TorchStep._store`.

In: rotated k, and v, and each token's slot. Out: the written pool. Used when no other kernel has
stored K and V (see `triton_rope_store`).

Shapes: T tokens, K kv heads, H head_dim (D: the next power of two), B block size, P blocks,
L layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_engine.attention.interface import KVSlots


def store_kv(slots: KVSlots, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
    """Store K and V of one layer. The last dimension of k and v must be contiguous; other strides
    are free."""
    tokens, kv_heads, dim = k_TKH.shape
    layer_P2KBH = slots.pool[:, slots.layer]
    _store_kv[(tokens, kv_heads)](
        *(slots.slots_T, k_TKH, k_TKH.stride(0), k_TKH.stride(1)),
        *(v_TKH, v_TKH.stride(0), v_TKH.stride(1)),
        *(layer_P2KBH, *layer_P2KBH.stride()[:3]),
        BLOCK=layer_P2KBH.shape[3],
        DIM=dim,
        DIM_P=triton.next_power_of_2(dim),
        num_warps=1,
    )


@triton.jit
def _store_kv(
    slots_T: tl.tensor,
    k_TKH: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_TKH: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    pool_P2KBH: tl.tensor,
    pool_block: tl.tensor,
    pool_kv: tl.tensor,
    pool_head: tl.tensor,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    DIM_P: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_T + token)  # int64: the pool has too many elements for 32-bit offsets
    if slot < 0:
        return
    dim_D = tl.arange(0, DIM_P)
    live_D = dim_D < DIM
    k_D = tl.load(k_TKH + token * k_token + head * k_head + dim_D, mask=live_D)
    v_D = tl.load(v_TKH + token * v_token + head * v_head + dim_D, mask=live_D)
    place = pool_P2KBH + slot // BLOCK * pool_block + head * pool_head + slot % BLOCK * DIM
    tl.store(place + dim_D, k_D, mask=live_D)
    tl.store(place + pool_kv + dim_D, v_D, mask=live_D)
