"""Compiled kernels for activations and softmax, with the same bits for a number at any place.

torch's silu computes the last numbers of a tensor with other instructions than the rest, and its
softmax divides a row among as many sums as fit its registers. These kernels compute every number
with the same vector instructions.

Shapes: T rows, F columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.attention.exact.openmp import call_on_threads, compiled
from baton_engine.attention.exact.vectors import (
    LANES,
    add,
    broadcast,
    divide,
    fma,
    larger,
    load,
    load_bf16,
    multiply,
    nearest_integer,
    power_of_2,
    rounded_to_bf16,
    smaller,
    store,
    store_bf16,
    subtract,
    take_next,
    zeros,
)

_inlined = numba.njit(nogil=True, error_model="numpy")

# exp(x) is 0 below LOWEST and constant above HIGHEST.
LOWEST, HIGHEST = np.float32(-88.0), np.float32(88.0)
LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: products of the first with integers up to 127 are exact.
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# 1 / n! for n from 7 to 2: the Taylor series of exp, to the last bit or two for |x| <= ln(2) / 2.
C7, C6, C5 = np.float32(1 / 5040), np.float32(1 / 720), np.float32(1 / 120)
C4, C3, C2 = np.float32(1 / 24), np.float32(1 / 6), np.float32(0.5)
ONE = np.float32(1.0)


@_inlined
def exponential(x: Any) -> Any:
    """exp of 16 numbers: 2^n exp(r) with x = n ln 2 + r. Not for NaN."""
    x = smaller(larger(x, broadcast(LOWEST)), broadcast(HIGHEST))
    n = nearest_integer(multiply(x, broadcast(LOG2_E)))
    r = fma(n, broadcast(-LN2_HIGH), x)
    r = fma(n, broadcast(-LN2_LOW), r)
    series = fma(broadcast(C7), r, broadcast(C6))
    series = fma(series, r, broadcast(C5))
    series = fma(series, r, broadcast(C4))
    series = fma(series, r, broadcast(C3))
    series = fma(series, r, broadcast(C2))
    series = fma(series, r, broadcast(ONE))
    series = fma(series, r, broadcast(ONE))
    return multiply(series, power_of_2(n))


# Columns of a row that a thread computes at a time.
SOME_COLUMNS = 1024

# The argument of silu_mul's kernels: the addresses of [T, 2 F] and [T, F]. `next` is the part of a
# row that the next free thread takes.
_SILU = np.dtype([(name, np.int64) for name in ("next", "rows", "columns", "source", "target")])


@functools.cache
def _silu_kernel(function: Callable[[Any], None]) -> int:
    return compiled(function, _SILU)


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F], from a CPU's [T, 2 F] with gate before up."""
    rows, columns = len(gate_up_TF), gate_up_TF.shape[1] // 2
    missing = -columns % LANES
    if missing:  # whole vectors
        parts_T2F = F.pad(gate_up_TF.view(rows, 2, columns), (0, missing))
        return silu_mul(parts_T2F.flatten(1))[:, :columns].contiguous()
    gate_up_TF = gate_up_TF.contiguous()
    out_TF = torch.empty(rows, columns, dtype=gate_up_TF.dtype)
    task = np.array([(0, rows, columns, gate_up_TF.data_ptr(), out_TF.data_ptr())], _SILU)
    function = bf16_silu_mul if gate_up_TF.dtype == torch.bfloat16 else fp32_silu_mul
    call_on_threads(_silu_kernel(function), task.ctypes.data)
    return out_TF


def fp32_silu_mul(pointer: Any) -> None:
    task = numba.carray(pointer, 1)[0]
    parts = -(-task.columns // SOME_COLUMNS)
    x = take_next(pointer)
    while x < task.rows * parts:
        row, first = x // parts, x % parts * SOME_COLUMNS
        gate = task.source + 8 * row * task.columns
        for column in range(first, min(first + SOME_COLUMNS, task.columns), LANES):
            up = load(gate + 4 * (task.columns + column))
            place = task.target + 4 * (row * task.columns + column)
            store(place, _silu_mul(load(gate + 4 * column), up))
        x = take_next(pointer)


def bf16_silu_mul(pointer: Any) -> None:
    task = numba.carray(pointer, 1)[0]
    parts = -(-task.columns // SOME_COLUMNS)
    x = take_next(pointer)
    while x < task.rows * parts:
        row, first = x // parts, x % parts * SOME_COLUMNS
        gate = task.source + 4 * row * task.columns
        for column in range(first, min(first + SOME_COLUMNS, task.columns), LANES):
            up = load_bf16(gate + 2 * (task.columns + column))
            place = task.target + 2 * (row * task.columns + column)
            store_bf16(place, rounded_to_bf16(_silu_mul(load_bf16(gate + 2 * column), up)))
        x = take_next(pointer)


@_inlined
def _silu_mul(gate: Any, up: Any) -> Any:
    divisor = add(broadcast(ONE), exponential(subtract(zeros(), gate)))
    return multiply(divide(gate, divisor), up)
