"""QK-norm, rotary embedding and the store of K and V in one pass on a CPU. Twin of
`layers.triton_rope_store`.

In: heads of q, k and v; cos and sin; weights of the norm. Out: rotated q, and k and v in the pool.
Arithmetic is float32, rounded once. Shapes: T tokens, N query heads, K kv heads, X = N + K,
Z = N + 2 K, H head_dim, R its rotated dimensions.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch

from baton_engine.cpu_kernels.codes import store_row
from baton_engine.cpu_kernels.eight_bits import round_row
from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.norm import norm_scale
from baton_engine.cpu_kernels.numbers import number_at, store_numbers
from baton_engine.cpu_kernels.openmp import COUNTER, inlined, run_kernel, task_class
from baton_engine.cpu_kernels.vectors import (
    broadcast,
    fma,
    load,
    load_address,
    multiply,
    rounded_to_bf16,
    store,
    subtract,
    take_next,
    zeros,
)

# The argument of the kernels. The addresses are of arrays: `heads` [T, Z, H], `q` [T, N, H], `cos`
# and `sin` [T, `half`] with half = R / 2, `weights` float32 [X, H] or 0, `slots` int64 [T]. `keys`
# and `values` are a layer's K and V, in blocks of `block` slots. The steps are the bytes from one
# block, head and slot to the next in both. `rounds` is 1 or 0. With codes, which are of fp8 if
# `fp8`, a layer has its exponents one byte per slot and `exponent_step` bytes per head apart.
_RopeStore = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("tokens", "queries", "kv_heads", "dim", "half")),
        *((name, np.int64) for name in ("heads", "q", "cos", "sin", "weights", "slots")),
        *((name, np.int64) for name in ("keys", "values", "block")),
        *((name, np.int64) for name in ("block_step", "head_step", "slot_step", "rounds")),
        *((name, np.int64) for name in ("key_exponents", "value_exponents")),
        *((name, np.int64) for name in ("exponent_step", "fp8")),
        ("eps", np.float32),
    ]
)


def can_rotate_store(heads_TZH: torch.Tensor, cos_T1R: torch.Tensor) -> bool:
    """Whether rotate_store() supports these tensors: on a CPU, contiguous, in float32 or bfloat16,
    with halves of the rotated dimensions and heads of whole vectors."""
    dim, half = heads_TZH.shape[-1], cos_T1R.shape[-1]
    return (
        heads_TZH.device.type == "cpu"
        and heads_TZH.is_contiguous()
        and heads_TZH.dtype in (torch.float32, torch.bfloat16)
        and heads_TZH.dtype == cos_T1R.dtype
        and half % LANES == 0
        and dim % LANES == 0
    )


def rotate_store(
    heads_TZH: torch.Tensor,
    num_heads: int,
    norm: tuple[torch.Tensor, float] | None,
    rope: tuple[torch.Tensor, torch.Tensor],
    kv: tuple[torch.Tensor, torch.Tensor],
    slots_T: torch.Tensor,
    exponents: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    rounds: bool = False,
) -> torch.Tensor:
    """Return rotated q [T, N, H], and rotate k in place. `norm` has weights [X, H] and eps. `kv`
    are views of a layer's K and V in the pool, [P, K, B, H] of the same dtype and strides. Token t
    is stored at [s // B, :, s % B] with s = `slots_T`[t], unless s is negative; with `rounds`, as
    eight_bits.rounded() has it. With `exponents` [P, K, B, 1] of K and of V, views of the same
    pool, it is stored as codes.

    Raises ValueError for a pool of another dtype: the kernel would write past its slots."""
    keys, values = kv
    if exponents is None and keys.dtype != heads_TZH.dtype:
        raise ValueError(f"heads in {heads_TZH.dtype} do not fit a pool in {keys.dtype}")
    assert keys.stride() == values.stride(), "K and V have other strides"
    tokens, all_heads, dim = heads_TZH.shape
    item = keys.element_size()
    q_TNH = torch.empty(tokens, num_heads, dim, dtype=heads_TZH.dtype)
    cos, sin = (table.contiguous() for table in rope)
    slots_T = slots_T.contiguous()
    weight_XH, eps = (None, 0.0) if norm is None else norm
    weights = None if weight_XH is None else weight_XH.float().contiguous()
    steps = (item * step for step in keys.stride()[:3])
    coded = (0, 0, 0, 0)
    if exponents is not None:
        block_step, exponent_step, slot_step, _ = exponents[0].stride()
        assert (block_step, slot_step) == (keys.stride(0), 1), "exponents of another pool"
        fp8 = keys.dtype == torch.float8_e4m3fn
        coded = (exponents[0].data_ptr(), exponents[1].data_ptr(), exponent_step, int(fp8))
    task = _RopeStore(
        (0,),
        *(tokens, num_heads, (all_heads - num_heads) // 2, dim, cos.shape[-1]),
        *(heads_TZH.data_ptr(), q_TNH.data_ptr(), cos.data_ptr(), sin.data_ptr()),
        *(0 if weights is None else weights.data_ptr(), slots_T.data_ptr()),
        *(keys.data_ptr(), values.data_ptr(), keys.shape[2], *steps, rounds, *coded, eps),
    )
    bf16 = heads_TZH.dtype == torch.bfloat16
    function = bf16_rotate_store if bf16 else fp32_rotate_store
    if exponents is not None:
        function = bf16_rotate_store_codes if bf16 else fp32_rotate_store_codes
    run_kernel(function, task, tokens)
    return q_TNH


def fp32_rotate_store(pointer: Any) -> None:
    _rotate_store_tokens(pointer, False, False)


def bf16_rotate_store(pointer: Any) -> None:
    _rotate_store_tokens(pointer, True, False)


def fp32_rotate_store_codes(pointer: Any) -> None:
    _rotate_store_tokens(pointer, False, True)


def bf16_rotate_store_codes(pointer: Any) -> None:
    _rotate_store_tokens(pointer, True, True)


@inlined
def _rotate_store_tokens(pointer: Any, bf16: bool, coded: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    item = 2 if bf16 else 4
    row = item * task.dim
    all_heads = task.queries + 2 * task.kv_heads
    wide = np.empty(task.dim, np.float32)
    token = take_next(pointer)
    while token < task.tokens:
        heads = task.heads + row * token * all_heads
        for head in range(task.queries):
            target = task.q + row * (token * task.queries + head)
            _rotate(task, token, heads + row * head, head, wide.ctypes.data, target, bf16)
        slot = load_address(task.slots + 8 * token)
        place = slot // task.block * task.block_step + slot % task.block * task.slot_step
        for head in range(task.kv_heads):
            key = heads + row * (task.queries + head)
            _rotate(task, token, key, task.queries + head, wide.ctypes.data, key, bf16)
            if slot >= 0:
                target = place + head * task.head_step
                value = key + row * task.kv_heads
                if coded:
                    # The blocks of codes and of exponents are the same.
                    block = slot // task.block * task.block_step
                    at = block + head * task.exponent_step + slot % task.block
                    exponents = task.key_exponents + at, task.value_exponents + at
                    codes = task.keys + target, task.values + target
                    store_row(key, codes[0], exponents[0], task.dim, bf16, task.fp8)
                    store_row(value, codes[1], exponents[1], task.dim, bf16, task.fp8)
                elif task.rounds:
                    round_row(key, task.keys + target, task.dim, bf16)
                    round_row(value, task.values + target, task.dim, bf16)
                else:
                    _copy(key, task.keys + target, task.dim, bf16)
                    _copy(value, task.values + target, task.dim, bf16)
        token = take_next(pointer)


@inlined
def _rotate(
    task: Any, token: int, source: int, head: int, wide: int, target: int, bf16: bool
) -> None:
    """Normalise, if there are weights, and rotate one head. `wide` has room for its numbers."""
    dim, half = task.dim, task.half
    squares = zeros()
    for column in range(0, dim, LANES):
        values = number_at(source, column, bf16)
        squares = fma(values, values, squares)
        store(wide + 4 * column, values)
    if task.weights != 0:
        scale = broadcast(norm_scale(squares, dim, task.eps))
        for column in range(0, dim, LANES):
            weights = load(task.weights + 4 * (head * dim + column))
            store(wide + 4 * column, multiply(multiply(load(wide + 4 * column), scale), weights))
    for column in range(0, half, LANES):
        cos = number_at(task.cos, token * half + column, bf16)
        sin = number_at(task.sin, token * half + column, bf16)
        low, high = load(wide + 4 * column), load(wide + 4 * (half + column))
        store(wide + 4 * column, fma(low, cos, subtract(zeros(), multiply(high, sin))))
        store(wide + 4 * (half + column), fma(low, sin, multiply(high, cos)))
    for column in range(0, dim, LANES):
        values = load(wide + 4 * column)
        store_numbers(target, column, rounded_to_bf16(values) if bf16 else values, bf16)


@inlined
def _copy(source: int, target: int, dim: int, bf16: bool) -> None:
    for column in range(0, dim, LANES):
        store_numbers(target, column, number_at(source, column, bf16), bf16)
