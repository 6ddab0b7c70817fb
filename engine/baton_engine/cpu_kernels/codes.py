"""Rows of 8-bit codes in the pool, of int8 or fp8, for compiled kernels. Twin: `kv.eight_bits`.

In: rows of numbers, or codes and exponents. Out: the other.

A code of fp8 has 1 bit of sign, 4 of exponent and 3 of fraction (E4M3). Shifted by 7 bits, it is a
float16 that is 2^8 times as small.

Shapes: N rows or pages, B rows of a page, H numbers of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from baton_engine.cpu_kernels.eight_bits import can_encode, decode_row, encode_row, row_exponent
from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import number_at, store_numbers
from baton_engine.cpu_kernels.openmp import (
    COUNTER,
    NONE_TAKEN,
    Task,
    inlined,
    run_kernel,
    task_class,
)
from baton_engine.cpu_kernels.vectors import (
    broadcast,
    load_address,
    load_byte,
    load_fp8,
    multiply,
    power_of_2,
    store_byte,
    store_fp8,
    take_next,
    zeros,
)
from baton_engine.kv.eight_bits import LOWEST_EXPONENT, NOT_FINITE, SMALLEST_POWER

_LOWEST_FP8 = LOWEST_EXPONENT - SMALLEST_POWER[torch.float8_e4m3fn]
_NAN = np.float32(np.nan)
# The addresses are of arrays: `rows` and `exponent_rows` int64 [N], `numbers` [N, B, H]. Page n has
# its codes `unit` bytes times rows[n] after `codes`, and its exponents likewise.
_Rows = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("pages", "block", "size", "numbers", "fp8")),
        *((name, np.int64) for name in ("codes", "unit", "rows")),
        *((name, np.int64) for name in ("exponents", "exponent_unit", "exponent_rows")),
    ]
)


@dataclass(frozen=True, slots=True)
class CodeRows:
    """Some rows of a view of the pool, and their exponents. Row n is row rows_N[n] of `codes`, int8
    [rows, B H], and row exponent_rows_N[n] of `exponents`, int8 [rows, B]. Rows of a view may
    overlap."""

    codes: torch.Tensor
    rows_N: torch.Tensor
    exponents: torch.Tensor
    exponent_rows_N: torch.Tensor
    fp8: bool


def can_move(dtype: torch.dtype, device: torch.device, size: int) -> bool:
    """Whether gather() and scatter() support rows of this many numbers."""
    return device.type == "cpu" and can_encode(dtype, size)


def gather(rows: CodeRows, numbers_NBH: torch.Tensor) -> None:
    """Write the numbers of some rows of codes."""
    bf16 = numbers_NBH.dtype == torch.bfloat16
    run_kernel(bf16_gather if bf16 else fp32_gather, _task_of(rows, numbers_NBH))


def scatter(numbers_NBH: torch.Tensor, rows: CodeRows) -> None:
    """Write the codes of numbers to some rows."""
    bf16 = numbers_NBH.dtype == torch.bfloat16
    run_kernel(bf16_scatter if bf16 else fp32_scatter, _task_of(rows, numbers_NBH))


def _task_of(rows: CodeRows, numbers_NBH: torch.Tensor) -> Task:
    assert numbers_NBH.is_contiguous(), "numbers are apart"
    task: Task = _Rows(
        *(NONE_TAKEN, *numbers_NBH.shape, numbers_NBH.data_ptr(), rows.fp8),
        *(rows.codes.data_ptr(), rows.codes.stride(0), rows.rows_N.data_ptr()),
        *(rows.exponents.data_ptr(), rows.exponents.stride(0), rows.exponent_rows_N.data_ptr()),
    )
    return task


def fp32_gather(pointer: Any) -> None:
    _move(pointer, False, False)


def bf16_gather(pointer: Any) -> None:
    _move(pointer, True, False)


def fp32_scatter(pointer: Any) -> None:
    _move(pointer, False, True)


def bf16_scatter(pointer: Any) -> None:
    _move(pointer, True, True)


@inlined
def _move(pointer: Any, bf16: bool, encode: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    size, fp8 = task.size, task.fp8
    row_bytes = size * (2 if bf16 else 4)
    page = take_next(pointer)
    while page < task.pages:
        codes = task.codes + task.unit * load_address(task.rows + 8 * page)
        place = task.exponent_unit * load_address(task.exponent_rows + 8 * page)
        exponents = task.exponents + place
        numbers = task.numbers + page * task.block * row_bytes
        for slot in range(task.block):
            row = numbers + slot * row_bytes
            if encode:
                store_row(row, codes + slot * size, exponents + slot, size, bf16, fp8)
            else:
                load_row(codes + slot * size, exponents + slot, row, size, bf16, fp8)
        page = take_next(pointer)


@inlined
def store_row(source: int, codes: int, exponent: int, size: int, bf16: bool, fp8: int) -> None:
    """Store the codes and the exponent of a row of numbers."""
    if not fp8:
        store_byte(exponent, encode_row(source, codes, size, bf16))
        return
    # The codes of fp8 are up to 2^8, those of int8 up to 2^7.
    power = row_exponent(source, size, bf16)
    if power == NOT_FINITE:
        for column in range(0, size, LANES):
            store_fp8(codes + column, zeros())
    else:
        power = max(power - 1, _LOWEST_FP8)
        inverse = power_of_2(broadcast(np.float32(-power)))
        for column in range(0, size, LANES):
            store_fp8(codes + column, multiply(number_at(source, column, bf16), inverse))
    store_byte(exponent, power)


@inlined
def load_row(codes: int, exponent: int, target: int, size: int, bf16: bool, fp8: int) -> None:
    """Store the numbers of a row of codes at `target`."""
    power = load_byte(exponent)
    if not fp8:
        decode_row(codes, power, target, size, bf16)
        return
    scale = broadcast(_NAN) if power == NOT_FINITE else power_of_2(broadcast(np.float32(power)))
    for column in range(0, size, LANES):
        store_numbers(target, column, multiply(load_fp8(codes + column), scale), bf16)
