"""QK-norm, rotary embedding and the store of K and V in one pass. Torch twin: `TorchOps.attend`.

In: the step's q, k and v from the fused projection. Out: q and k normalised and rotated in place,
and k and v stored in the pool. Arithmetic is float32. A program computes HEADS heads of a token.
The halves (a, b) of a head's first R numbers become (a cos - b sin, b cos + a sin) in q and k. The
rest of these heads, and v, do not change.

Shapes: T tokens, N query heads, K kv heads, X = N + K, Z = N + 2 K, H head_dim, R its rotated
numbers, B block size, P blocks of the pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_engine.attention.interface import KVSlots
from baton_engine.attention.triton_codes import (
    as_bytes,
    codes_of,
    exponent_of,
    is_fp8,
    magnitude,
    rounded,
)
from baton_engine.layers.rotary import HeadNorm, RopeTables

# Maximum number of heads per program: 16 heads of 128 are 2,048 numbers, enough for 4 warps.
MOST_HEADS = 16


def rotate_store(
    heads_TZH: torch.Tensor,
    num_heads: int,
    norm: HeadNorm | None,
    rope: RopeTables,
    slots: KVSlots,
) -> None:
    """`heads_TZH` and the last dimensions of the pool, cos and sin must be contiguous. K and V are
    views of one pool with the same strides."""
    tokens, all_heads, dim = heads_TZH.shape
    cos_T1R, sin_T1R = rope
    k_PKBH, v_PKBH = slots.k_PKBH, slots.v_PKBV
    assert k_PKBH.stride() == v_PKBH.stride(), "K and V have other strides"
    kept = slots.exponents
    exponents = (k_PKBH, 0) if kept is None else (kept.k_PKB1, kept.k_PKB1.stride(1))
    heads = min(triton.next_power_of_2(all_heads), MOST_HEADS)
    _rotate_store[(tokens, triton.cdiv(all_heads, heads))](
        *(heads_TZH, cos_T1R, sin_T1R, cos_T1R.stride(0)),
        *(heads_TZH if norm is None else norm.weight_XH, 0.0 if norm is None else norm.eps),
        *(as_bytes(k_PKBH, kept), v_PKBH.storage_offset() - k_PKBH.storage_offset()),
        *(slots.slots_T, *k_PKBH.stride()[:3], *exponents),
        CODED=kept is not None,
        FP8=is_fp8(k_PKBH),
        HAS_NORM=norm is not None,
        QUERIES=num_heads,
        ALL=all_heads,
        BLOCK=k_PKBH.shape[2],
        HALF=dim // 2,
        ROTARY=cos_T1R.shape[-1],
        HALF_P=triton.next_power_of_2(dim // 2),
        HEADS=heads,
        ROUNDS=slots.rounds,
    )


@triton.jit
def _rotate_store(
    heads_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    angle_stride: tl.tensor,
    weight_ptr: tl.tensor,
    eps: tl.tensor,
    pool_ptr: tl.tensor,
    part_stride: tl.tensor,
    slots_ptr: tl.tensor,
    block_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    exponents_ptr: tl.tensor,
    exponent_stride: tl.tensor,
    CODED: tl.constexpr,
    FP8: tl.constexpr,
    HAS_NORM: tl.constexpr,
    QUERIES: tl.constexpr,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_P: tl.constexpr,
    HEADS: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    KV: tl.constexpr = (ALL - QUERIES) // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, HALF_P)[None, :]
    inside = (head < ALL) & (column < HALF)
    qk = inside & (head < QUERIES + KV)
    turned = qk & (column < ROTARY)
    # ROTARY columns have the two halves of the rotated numbers, the others those of the rest.
    low = tl.where(column < ROTARY, column, column + ROTARY)
    high = low + tl.where(column < ROTARY, ROTARY, HALF - ROTARY)

    at = heads_ptr + (token * ALL + head) * (2 * HALF)
    first = tl.load(at + low, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + high, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        a, b = tl.where(qk, first, 0.0), tl.where(qk, second, 0.0)
        squares = tl.sum(a * a + b * b, axis=1)[:, None]
        scale = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        weight_at = weight_ptr + head * (2 * HALF)
        a = a * scale * tl.load(weight_at + low, mask=qk, other=0.0).to(tl.float32)
        b = b * scale * tl.load(weight_at + high, mask=qk, other=0.0).to(tl.float32)
        first, second = tl.where(qk, a, first), tl.where(qk, b, second)
    angle = token * angle_stride + column
    cos = tl.load(cos_ptr + angle, mask=column < ROTARY, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=column < ROTARY, other=0.0).to(tl.float32)
    kind = heads_ptr.dtype.element_ty
    a, b = tl.where(turned, first, 0.0), tl.where(turned, second, 0.0)
    first = tl.where(turned, a * cos - b * sin, first).to(kind)
    second = tl.where(turned, b * cos + a * sin, second).to(kind)
    tl.store(at + low, first, mask=qk)
    tl.store(at + high, second, mask=qk)

    if ROUNDS:
        # Numbers outside are 0.
        a, b = first.to(tl.float32), second.to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(a), magnitude(b)), axis=1)[:, None]
        first, second = rounded(a, largest).to(kind), rounded(b, largest).to(kind)
    slot = tl.load(slots_ptr + token)
    kept = inside & (head >= QUERIES) & (slot >= 0)
    part, kv_head = (head - QUERIES) // KV, (head - QUERIES) % KV
    place = (slot // BLOCK) * block_stride + (slot % BLOCK) * slot_stride
    to = pool_ptr + place + part * part_stride + kv_head * head_stride
    if CODED:
        first, second = first.to(tl.float32), second.to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(first), magnitude(second)), axis=1)[:, None]
        exponent = exponent_of(largest, FP8)
        first, second = codes_of(first, exponent, FP8), codes_of(second, exponent, FP8)
        # The exponents of V are as far from those of K as their codes.
        place = (slot // BLOCK) * block_stride + slot % BLOCK
        at = exponents_ptr + place + part * part_stride + kv_head * exponent_stride
        kept_head = (head >= QUERIES) & (head < ALL) & (slot >= 0)
        tl.store(at, exponent.to(tl.int8), mask=kept_head)
    tl.store(to + low, first, mask=kept)
    tl.store(to + high, second, mask=kept)
