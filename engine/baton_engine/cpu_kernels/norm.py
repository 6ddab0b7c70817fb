"""Residual add and RMSNorm in one pass on a CPU. Twin of `layers.triton_norm`.

In: the residual stream x, the delta to add to it, and the norm's weight. Out: x changed in place,
and its norm. The sum is rounded to x's dtype before it is normalised, as if it were stored and read
again; all other arithmetic is float32. Shapes: T tokens, D hidden size.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import number_at, store_numbers
from baton_engine.cpu_kernels.openmp import COUNTER, inlined, run_kernel, task_class
from baton_engine.cpu_kernels.vectors import (
    add,
    broadcast,
    fma,
    lanes_of,
    load,
    multiply,
    rounded_to_bf16,
    take_next,
    zeros,
)

_NUMBERS = (torch.float32, torch.bfloat16)
# Rows that a thread takes at a time.
SOME_ROWS = 4

# The argument of the kernels. The addresses are of arrays [T, columns], and [columns] for `weight`,
# which is float32 if it is `wide`; `delta` may be 0. The mean square of a row is the sum of squares
# by `size`.
_Norm = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("rows", "columns", "size")),
        *((name, np.int64) for name in ("x", "delta", "weight", "wide", "out")),
        ("eps", np.float32),
    ]
)


def can_norm(x: torch.Tensor) -> bool:
    """Whether add_norm() supports this tensor: on a CPU, contiguous, in float32 or bfloat16."""
    return x.is_cpu and x.dtype in _NUMBERS and x.is_contiguous()


def add_norm(
    x_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add delta to x in place and return RMSNorm(x) [T, D]. The weight may be float32."""
    size = x_TD.shape[1]
    missing = -size % LANES
    if missing:  # whole vectors
        if delta_TD is not None:
            x_TD += delta_TD
        some_TD, weight_D = F.pad(x_TD, (0, missing)), F.pad(weight_D, (0, missing))
        return _add_norm(some_TD, None, weight_D, eps, size)[:, :size].contiguous()
    delta_TD = None if delta_TD is None else delta_TD.contiguous()
    return _add_norm(x_TD, delta_TD, weight_D, eps, size)


def _add_norm(
    x_TD: torch.Tensor, delta_TD: torch.Tensor | None, weight_D: torch.Tensor, eps: float, size: int
) -> torch.Tensor:
    out_TD, (rows, columns) = torch.empty_like(x_TD), x_TD.shape
    weight_D = (weight_D if weight_D.dtype in _NUMBERS else weight_D.float()).contiguous()
    task = _Norm(rows=rows, columns=columns, size=size, eps=eps)
    task.x, task.weight, task.out = x_TD.data_ptr(), weight_D.data_ptr(), out_TD.data_ptr()
    task.wide = weight_D.dtype == torch.float32
    if delta_TD is not None:
        task.delta = delta_TD.data_ptr()
    function = bf16_add_norm if x_TD.dtype == torch.bfloat16 else fp32_add_norm
    run_kernel(function, task, -(-rows // SOME_ROWS))
    return out_TD


def fp32_add_norm(pointer: Any) -> None:
    _add_norm_rows(pointer, False)


def bf16_add_norm(pointer: Any) -> None:
    _add_norm_rows(pointer, True)


@inlined
def _add_norm_rows(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    first = take_next(pointer) * SOME_ROWS
    while first < task.rows:
        for row in range(first, min(first + SOME_ROWS, task.rows)):
            _add_norm_row(task, row * task.columns, bf16)
        first = take_next(pointer) * SOME_ROWS


@inlined
def _add_norm_row(task: Any, begin: int, bf16: bool) -> None:
    item = 2 if bf16 else 4
    x, delta, out = task.x + item * begin, task.delta + item * begin, task.out + item * begin
    squares = zeros()
    for column in range(0, task.columns, LANES):
        values = number_at(x, column, bf16)
        if task.delta != 0:
            values = add(values, number_at(delta, column, bf16))
            if bf16:
                values = rounded_to_bf16(values)
            store_numbers(x, column, values, bf16)
        squares = fma(values, values, squares)
    scale = broadcast(norm_scale(squares, task.size, task.eps))
    for column in range(0, task.columns, LANES):
        values = multiply(number_at(x, column, bf16), scale)
        if task.wide != 0:
            values = multiply(values, load(task.weight + 4 * column))
        else:
            values = multiply(values, number_at(task.weight, column, True))
        store_numbers(out, column, rounded_to_bf16(values) if bf16 else values, bf16)


@inlined
def norm_scale(squares: Any, size: int, eps: Any) -> Any:
    """1 / sqrt(mean + eps) of `size` squares that are added in 16 lanes."""
    total = np.float32(0.0)
    for lane in lanes_of(squares):
        total += lane
    return np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)
