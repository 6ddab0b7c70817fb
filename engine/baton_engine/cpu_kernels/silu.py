"""Compiled silu of a gate times up, with the same bits for a number at any place.

torch's silu computes the last numbers of a tensor with other instructions than the rest. These
kernels compute every number with the same vector instructions.

Shapes: T rows, F columns.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import ONE, exponential, number_at, store_numbers
from baton_engine.cpu_kernels.openmp import COUNTER, inlined, run_kernel, task_class
from baton_engine.cpu_kernels.vectors import (
    add,
    broadcast,
    divide,
    multiply,
    rounded_to_bf16,
    subtract,
    take_next,
    zeros,
)

# Columns of a row that a thread computes at a time.
SOME_COLUMNS = 1024
# The argument of silu_mul's kernels: the addresses of [T, 2 F] and [T, F]. `next` is the part of a
# row that the next free thread takes.
_Silu = task_class(
    [COUNTER, *((name, np.int64) for name in ("rows", "columns", "source", "target"))]
)


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F], from a CPU's [T, 2 F] with gate before up."""
    if gate_up_TF.dtype not in (torch.float32, torch.bfloat16):
        return silu_mul(gate_up_TF.float()).to(gate_up_TF.dtype)
    rows, columns = gate_up_TF.shape[0], gate_up_TF.shape[1] // 2
    missing = -columns % LANES
    if missing:  # whole vectors
        parts_T2F = F.pad(gate_up_TF.view(rows, 2, columns), (0, missing))
        return silu_mul(parts_T2F.flatten(1))[:, :columns].contiguous()
    gate_up_TF = gate_up_TF.contiguous()
    out_TF = torch.empty(rows, columns, dtype=gate_up_TF.dtype)
    places = gate_up_TF.data_ptr(), out_TF.data_ptr()
    task = _Silu(rows=rows, columns=columns, source=places[0], target=places[1])
    function = bf16_silu_mul if gate_up_TF.dtype == torch.bfloat16 else fp32_silu_mul
    run_kernel(function, task, rows * -(-columns // SOME_COLUMNS))
    return out_TF


def fp32_silu_mul(pointer: Any) -> None:
    _silu_mul_rows(pointer, False)


def bf16_silu_mul(pointer: Any) -> None:
    _silu_mul_rows(pointer, True)


@inlined
def _silu_mul_rows(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    columns, source, target = task.columns, task.source, task.target
    parts = -(-columns // SOME_COLUMNS)
    x = take_next(pointer)
    while x < task.rows * parts:
        row, first = x // parts, x % parts * SOME_COLUMNS
        for column in range(first, min(first + SOME_COLUMNS, columns), LANES):
            gate = number_at(source, 2 * row * columns + column, bf16)
            up = number_at(source, (2 * row + 1) * columns + column, bf16)
            product = silu_product(gate, up)
            product = rounded_to_bf16(product) if bf16 else product
            store_numbers(target, row * columns + column, product, bf16)
        x = take_next(pointer)


@inlined
def silu_product(gate: Any, up: Any) -> Any:
    divisor = add(broadcast(ONE), exponential(subtract(zeros(), gate)))
    return multiply(divide(gate, divisor), up)
