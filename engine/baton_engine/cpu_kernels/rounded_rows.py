"""Rows rounded to int8 by a scale per row on a CPU. Twin of
`layers.quantization.quantized_weight.input_codes`, with the same bits.

In: rows [T, I]. Out: int8 codes, and the scale of each row. The scale is that of the row's largest
number, or given. Shapes: T rows, I inputs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
import torch.nn.functional as F

from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import number_at
from baton_engine.cpu_kernels.openmp import COUNTER, inlined, run_kernel, task_class
from baton_engine.cpu_kernels.vectors import (
    broadcast,
    divide,
    lanes_of,
    larger,
    nearest_integer,
    smaller,
    store_int8,
    store_number,
    subtract,
    take_next,
    zeros,
)

LARGEST, LEAST = np.float32(127.0), np.float32(-128.0)

# The argument of the kernels. The addresses are of arrays: `source` and `codes` [T, I], `scales`
# float32 [T]. `scale` is the given one, or 0.
_Rounding = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("rows", "columns", "source", "codes", "scales")),
        ("scale", np.float32),
    ]
)


def int8_rows(x_TI: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes [T, I] and the scales [T] of rows whose number of inputs 4 divides."""
    if x_TI.dtype not in (torch.float32, torch.bfloat16):
        x_TI = x_TI.float()
    rows, inputs = x_TI.shape
    missing = -inputs % LANES  # whole vectors
    x_TI = F.pad(x_TI, (0, missing)) if missing else x_TI.contiguous()
    codes_TI = torch.empty(x_TI.shape, dtype=torch.int8)
    scales_T = torch.empty(rows)
    task = _Rounding(rows=rows, columns=inputs + missing, scale=scale or 0.0)
    task.source, task.codes = x_TI.data_ptr(), codes_TI.data_ptr()
    task.scales = scales_T.data_ptr()
    function = bf16_int8_rows if x_TI.dtype == torch.bfloat16 else fp32_int8_rows
    run_kernel(function, task, rows)
    return codes_TI[:, :inputs] if missing else codes_TI, scales_T


def fp32_int8_rows(pointer: Any) -> None:
    _round_rows(pointer, False)


def bf16_int8_rows(pointer: Any) -> None:
    _round_rows(pointer, True)


@inlined
def _round_rows(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    row = take_next(pointer)
    while row < task.rows:
        begin, scale = row * task.columns, task.scale
        if scale == 0:
            scale = _scale_of(task.source, begin, task.columns, bf16)
        store_number(task.scales + 4 * row, scale)
        divisor = broadcast(scale)
        for column in range(begin, begin + task.columns, LANES):
            values = divide(number_at(task.source, column, bf16), divisor)
            values = smaller(larger(values, broadcast(LEAST)), broadcast(LARGEST))
            store_int8(task.codes + column, nearest_integer(values))
        row = take_next(pointer)


@inlined
def _scale_of(source: int, begin: int, columns: int, bf16: bool) -> Any:
    most = zeros()
    for column in range(begin, begin + columns, LANES):
        values = number_at(source, column, bf16)
        most = larger(most, larger(values, subtract(zeros(), values)))
    largest = np.float32(0.0)
    for lane in lanes_of(most):
        largest = max(largest, lane)
    scale = largest / LARGEST
    return np.float32(1.0) if scale == 0 else scale
