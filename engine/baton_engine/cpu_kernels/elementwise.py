"""Compiled kernels for activations, softmax and sums of splits, with the same bits for a number at
any place.

torch's silu computes the last numbers of a tensor with other instructions than the rest, and its
softmax divides a row among as many sums as fit its registers. These kernels compute every number
with the same vector instructions.

Shapes: T rows, F columns; X matrices of Y rows, of which M are used, L scores of a row, C splits of
S keys; N query heads, K kv heads, G = N / K, H head_dim.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton_engine.cpu_kernels.openmp import COUNTER, NONE_TAKEN, inlined, run_kernel
from baton_engine.cpu_kernels.vectors import (
    LANES,
    add,
    broadcast,
    divide,
    fma,
    lanes_of,
    larger,
    load,
    load_bf16,
    load_index,
    multiply,
    nearest_integer,
    only_lanes,
    power_of_2,
    rounded_to_bf16,
    smaller,
    store,
    store_bf16,
    subtract,
    take_next,
    zeros,
)

# exp(x) is 0 below LOWEST and infinite above HIGHEST.
LOWEST, HIGHEST = np.float32(-88.0), np.float32(89.0)
LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: products of the first with integers up to 127 are exact.
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# 1 / n! for n from 7 to 2: the Taylor series of exp, to the last bit or two for |x| <= ln(2) / 2.
C7, C6, C5 = np.float32(1 / 5040), np.float32(1 / 720), np.float32(1 / 120)
C4, C3, C2 = np.float32(1 / 24), np.float32(1 / 6), np.float32(0.5)
ONE = np.float32(1.0)


@inlined
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


@inlined
def number_at(array: int, index: int, bf16: bool) -> Any:
    """16 numbers of an array from an index on, in float32."""
    return load_bf16(array + 2 * index) if bf16 else load(array + 4 * index)


@inlined
def store_numbers(array: int, index: int, values: Any, bf16: bool) -> None:
    """Store 16 numbers; with `bf16` they must be rounded."""
    if bf16:
        store_bf16(array + 2 * index, values)
    else:
        store(array + 4 * index, values)


# Columns of a row that a thread computes at a time.
SOME_COLUMNS = 1024

# The argument of silu_mul's kernels: the addresses of [T, 2 F] and [T, F]. `next` is the part of a
# row that the next free thread takes.
_SILU = np.dtype(
    [COUNTER, *((name, np.int64) for name in ("rows", "columns", "source", "target"))], align=True
)


def silu_mul(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F], from a CPU's [T, 2 F] with gate before up."""
    if gate_up_TF.dtype not in (torch.float32, torch.bfloat16):
        return silu_mul(gate_up_TF.float()).to(gate_up_TF.dtype)
    rows, columns = len(gate_up_TF), gate_up_TF.shape[1] // 2
    missing = -columns % LANES
    if missing:  # whole vectors
        parts_T2F = F.pad(gate_up_TF.view(rows, 2, columns), (0, missing))
        return silu_mul(parts_T2F.flatten(1))[:, :columns].contiguous()
    gate_up_TF = gate_up_TF.contiguous()
    out_TF = torch.empty(rows, columns, dtype=gate_up_TF.dtype)
    task = np.array([(NONE_TAKEN, rows, columns, gate_up_TF.data_ptr(), out_TF.data_ptr())], _SILU)
    function = bf16_silu_mul if gate_up_TF.dtype == torch.bfloat16 else fp32_silu_mul
    run_kernel(function, task)
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
            product = _silu_mul(gate, up)
            product = rounded_to_bf16(product) if bf16 else product
            store_numbers(target, row * columns + column, product, bf16)
        x = take_next(pointer)


@inlined
def _silu_mul(gate: Any, up: Any) -> Any:
    divisor = add(broadcast(ONE), exponential(subtract(zeros(), gate)))
    return multiply(divide(gate, divisor), up)


# The argument of the softmax kernels. `source` is the address of float32 scores [X, Y, L], or that
# of a bfloat16 array whose sum with `lost` is the scores. `seen` is the address of int32 [M, 2]: of
# each row, the keys [begin, end) that it sees. Weights go to `target`, [X, C, Y, S].
_SOFTMAX = np.dtype(
    [
        COUNTER,
        *((name, np.int64) for name in ("matrices", "used", "height", "keys", "split")),
        *((name, np.int64) for name in ("source", "lost", "seen", "target")),
        ("scale", np.float32),
    ],
    align=True,
)
_HIDDEN = np.float32(-np.inf)
# Rows that a thread takes at a time.
SOME_ROWS = 8


def softmax_(scores_TL: torch.Tensor) -> torch.Tensor:
    """Replace float32 scores of a CPU by their softmax. L must be a multiple of 16. A score of -inf
    gets a weight of exactly 0, so the bits of the others do not depend on how many such scores
    there are, if 16 follow each other."""
    rows, keys = scores_TL.shape
    seen = np.array([(0, keys)], np.int32)
    place = scores_TL.data_ptr()
    task = np.zeros(1, _SOFTMAX)
    task[0] = (NONE_TAKEN, rows, 1, 1, keys, keys, place, 0, seen.ctypes.data, place, 1.0)
    run_kernel(fp32_softmax, task)
    return scores_TL


def prompt_weights(
    scores: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    seen_M2: npt.NDArray[np.int32],
    split: int,
    dtype: torch.dtype,
    scale: float = 1.0,
) -> torch.Tensor:
    """The softmax [X, C, Y, S], in the dtype of V, of scores [X, Y, L] of the keys that each row
    sees: float32 scores, or two bfloat16 parts whose sum times `scale` they are. Rows from M on are
    not set."""
    if dtype not in (torch.float32, torch.bfloat16):
        return prompt_weights(scores, seen_M2, split, torch.float32, scale).to(dtype)
    near_XYL, lost_XYL = scores if isinstance(scores, tuple) else (scores, scores)
    matrices, height, keys = near_XYL.shape
    weights_XCYS = torch.empty(matrices, keys // split, height, split, dtype=dtype)
    task = np.zeros(1, _SOFTMAX)
    task[0] = (
        *(NONE_TAKEN, matrices, len(seen_M2), height, keys, split, near_XYL.data_ptr()),
        *(lost_XYL.data_ptr(), seen_M2.ctypes.data, weights_XCYS.data_ptr(), scale),
    )
    if isinstance(scores, tuple):
        function = bf16_softmax_of_sums
    else:
        function = bf16_softmax if dtype == torch.bfloat16 else fp32_softmax
    run_kernel(function, task)
    return weights_XCYS


def fp32_softmax(pointer: Any) -> None:
    _softmax_rows(pointer, False, False)


def bf16_softmax(pointer: Any) -> None:
    _softmax_rows(pointer, False, True)


def bf16_softmax_of_sums(pointer: Any) -> None:
    _softmax_rows(pointer, True, True)


@inlined
def _softmax_rows(pointer: Any, sums: bool, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    scratch = np.empty(task.keys, np.float32)
    count = task.matrices * task.used
    first = take_next(pointer) * SOME_ROWS
    while first < count:
        for x in range(first, min(first + SOME_ROWS, count)):
            _softmax_row(task, x, scratch.ctypes.data, sums, bf16)
        first = take_next(pointer) * SOME_ROWS


@inlined
def softmax_in_place(place: int, keys: int) -> None:
    """Replace float32 scores by their softmax. `keys` must be a multiple of 16. A score of -inf
    gets a weight of exactly 0, so the bits of the others do not depend on how many such scores
    there are, if 16 follow each other."""
    highest = broadcast(_HIDDEN)
    for key in range(0, keys, LANES):
        highest = larger(highest, load(place + 4 * key))
    factor = _exponentials(place, 0, keys, highest)
    for key in range(0, keys, LANES):
        store(place + 4 * key, multiply(load(place + 4 * key), factor))


@inlined
def _exponentials(place: int, first: int, end: int, highest: Any) -> Any:
    """Replace the scores of keys [first, end) by exp(score - largest). Returns one by their sum, in
    all lanes. The largest score is one of `highest`."""
    most = _HIDDEN
    for lane in lanes_of(highest):
        if lane > most:
            most = lane
    total = zeros()
    for key in range(first, end, LANES):
        weights = exponential(subtract(load(place + 4 * key), broadcast(most)))
        total = add(total, weights)
        store(place + 4 * key, weights)
    whole = np.float32(0.0)
    for lane in lanes_of(total):
        whole += lane
    return broadcast(ONE / whole)


@inlined
def _softmax_row(task: Any, x: int, scratch: int, sums: bool, bf16: bool) -> None:
    """Compute one row. `scratch` has room for its scores. With `sums`, they are in two parts; with
    `bf16`, weights are rounded to bfloat16."""
    matrix, row = x // task.used, x % task.used
    begin, end = load_index(task.seen + 8 * row), load_index(task.seen + 8 * row + 4)
    source = (matrix * task.height + row) * task.keys
    first = begin // LANES * LANES
    highest = broadcast(_HIDDEN)
    near_place, lost_place, scale = task.source, task.lost, broadcast(task.scale)
    for key in range(first, end, LANES):
        if sums:
            near = load_bf16(near_place + 2 * (source + key))
            scores = add(near, load_bf16(lost_place + 2 * (source + key)))
            scores = multiply(scores, scale)
        else:
            scores = load(near_place + 4 * (source + key))
        if begin > key or end < key + LANES:
            scores = only_lanes(scores, begin - key, end - key, _HIDDEN)
        highest = larger(highest, scores)
        store(scratch + 4 * key, scores)
    factor = _exponentials(scratch, first, end, highest)
    height, split, target = task.height, task.split, task.target
    splits = task.keys // split
    for number in range(splits):
        place = ((matrix * splits + number) * height + row) * split
        for key in range(0, split, LANES):
            position = number * split + key
            weights = zeros()
            if first <= position and position < end:
                weights = multiply(load(scratch + 4 * position), factor)
            if bf16:
                store_bf16(target + 2 * (place + key), rounded_to_bf16(weights))
            else:
                store(target + 4 * (place + key), weights)


# The argument of the kernels that add splits: the addresses of sums [X, C, Y, H] and of output
# rows of `heads` * H numbers, the first of which is that of the first token. Row m of matrix x is
# query head (`first` + x) G + m % G of token m // G.
_SPLITS = np.dtype(
    [
        COUNTER,
        *((name, np.int64) for name in ("matrices", "splits", "height", "dim", "tokens")),
        *((name, np.int64) for name in ("group", "heads", "first", "sums", "output")),
    ],
    align=True,
)


def can_add_splits(out_TNH: torch.Tensor) -> bool:
    """Whether add_splits() supports these outputs."""
    numbers = out_TNH.dtype in (torch.float32, torch.bfloat16)
    whole = out_TNH.shape[-1] % LANES == 0 and out_TNH.is_contiguous()
    return out_TNH.device.type == "cpu" and numbers and whole


def add_splits(sums_XCYH: torch.Tensor, out_TNH: torch.Tensor, group: int, first: int) -> None:
    """Add the splits of each row in ascending order, in float32, and write the sums of the T G rows
    of matrix x to query heads (first + x) G and following of `out_TNH`."""
    matrices, splits, height, dim = sums_XCYH.shape
    task = np.zeros(1, _SPLITS)
    task[0] = (
        *(NONE_TAKEN, matrices, splits, height, dim, len(out_TNH), group, out_TNH.shape[1], first),
        *(sums_XCYH.data_ptr(), out_TNH.data_ptr()),
    )
    function = bf16_add_splits if out_TNH.dtype == torch.bfloat16 else fp32_add_splits
    run_kernel(function, task)


def fp32_add_splits(pointer: Any) -> None:
    _add_splits(pointer, False)


def bf16_add_splits(pointer: Any) -> None:
    _add_splits(pointer, True)


@inlined
def _add_splits(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    dim, group, step = task.dim, task.group, task.height * task.dim
    turn = take_next(pointer)
    while turn < task.matrices * task.tokens:
        x, token = turn // task.tokens, turn % task.tokens
        for member in range(group):
            source = x * task.splits * step + (token * group + member) * dim
            target = (token * task.heads + (task.first + x) * group + member) * dim
            for column in range(0, dim, LANES):
                total = number_at(task.sums, source + column, bf16)
                for split in range(1, task.splits):
                    part = number_at(task.sums, source + split * step + column, bf16)
                    total = add(total, part)
                if bf16:
                    total = rounded_to_bf16(total)
                store_numbers(task.output, target + column, total, bf16)
        turn = take_next(pointer)
