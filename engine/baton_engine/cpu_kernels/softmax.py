"""Compiled softmax of attention's scores, with the same bits for a number at any place.

torch's softmax divides a row among as many sums as fit its registers. These kernels add every row
in the same order.

Shapes: X matrices of Y rows, of which M are used, L scores of a row, C splits of S keys.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from baton_engine.cpu_kernels.numbers import ONE, exponential
from baton_engine.cpu_kernels.openmp import COUNTER, NONE_TAKEN, inlined, run_kernel
from baton_engine.cpu_kernels.vectors import (
    LANES,
    add,
    broadcast,
    lanes_of,
    larger,
    load,
    load_bf16,
    load_index,
    load_number,
    multiply,
    only_lanes,
    rounded_to_bf16,
    store,
    store_bf16,
    subtract,
    take_next,
    zeros,
)

# The argument of the softmax kernels. `source` is the address of float32 scores [X, Y, L], or that
# of a bfloat16 array whose sum with `lost` is the scores. `seen` is the address of int32 [M, 2]: of
# each row, the keys [begin, end) that it sees. `sinks` is the address of float32 [X, M], or 0 if
# rows have no sink. Weights go to `target`, [X, C, Y, S].
_SOFTMAX = np.dtype(
    [
        COUNTER,
        *((name, np.int64) for name in ("matrices", "used", "height", "keys", "split")),
        *((name, np.int64) for name in ("source", "lost", "seen", "sinks", "target")),
        ("scale", np.float32),
    ],
    align=True,
)
HIDDEN = np.float32(-np.inf)
# Rows that a thread takes at a time.
SOME_ROWS = 8


def softmax_(scores_TL: torch.Tensor, sinks_T: torch.Tensor | None = None) -> torch.Tensor:
    """Replace float32 scores of a CPU by their softmax. L must be a multiple of 16. A score of -inf
    gets a weight of exactly 0, so the bits of the others do not depend on how many such scores
    there are, if 16 follow each other. A row's sink is one more score, whose weight is left out."""
    rows, keys = scores_TL.shape
    seen = np.array([(0, keys)], np.int32)
    place, sinks = scores_TL.data_ptr(), _address(sinks_T)
    task = np.zeros(1, _SOFTMAX)
    task[0] = (NONE_TAKEN, rows, 1, 1, keys, keys, place, 0, seen.ctypes.data, sinks, place, 1.0)
    run_kernel(fp32_softmax, task)
    return scores_TL


def prompt_weights(
    scores: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    seen_M2: npt.NDArray[np.int32],
    split: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    sinks_XM: torch.Tensor | None = None,
) -> torch.Tensor:
    """The softmax [X, C, Y, S], in the dtype of V, of scores [X, Y, L] of the keys that each row
    sees: float32 scores, or two bfloat16 parts whose sum times `scale` they are. Rows from M on are
    not set. Sinks are those of softmax_()."""
    if dtype not in (torch.float32, torch.bfloat16):
        wide = prompt_weights(scores, seen_M2, split, torch.float32, scale, sinks_XM)
        return wide.to(dtype)
    near_XYL, lost_XYL = scores if isinstance(scores, tuple) else (scores, scores)
    matrices, height, keys = near_XYL.shape
    weights_XCYS = torch.empty(matrices, keys // split, height, split, dtype=dtype)
    task = np.zeros(1, _SOFTMAX)
    task[0] = (
        *(NONE_TAKEN, matrices, len(seen_M2), height, keys, split, near_XYL.data_ptr()),
        *(lost_XYL.data_ptr(), seen_M2.ctypes.data, _address(sinks_XM)),
        *(weights_XCYS.data_ptr(), scale),
    )
    if isinstance(scores, tuple):
        function = bf16_softmax_of_sums
    else:
        function = bf16_softmax if dtype == torch.bfloat16 else fp32_softmax
    run_kernel(function, task)
    return weights_XCYS


def _address(sinks: torch.Tensor | None) -> int:
    if sinks is None:
        return 0
    assert sinks.dtype == torch.float32
    assert sinks.is_contiguous()
    return sinks.data_ptr()


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
def softmax_in_place(place: int, keys: int, sink: Any) -> None:
    """Replace float32 scores by their softmax. `keys` must be a multiple of 16. A score of -inf
    gets a weight of exactly 0, so the bits of the others do not depend on how many such scores
    there are, if 16 follow each other. `sink` is HIDDEN for a row without one."""
    highest = broadcast(HIDDEN)
    for key in range(0, keys, LANES):
        highest = larger(highest, load(place + 4 * key))
    factor = _exponentials(place, 0, keys, highest, sink)
    for key in range(0, keys, LANES):
        store(place + 4 * key, multiply(load(place + 4 * key), factor))


@inlined
def _exponentials(place: int, first: int, end: int, highest: Any, sink: Any) -> Any:
    """Replace the scores of keys [first, end) by exp(score - largest). Returns one by the sum of
    these and of the sink's, in all lanes. The largest score is one of `highest` or the sink."""
    most = sink
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
    if sink > HIDDEN:
        whole += lanes_of(exponential(broadcast(sink - most)))[0]
    return broadcast(ONE / whole)


@inlined
def _softmax_row(task: Any, x: int, scratch: int, sums: bool, bf16: bool) -> None:
    """Compute one row. `scratch` has room for its scores. With `sums`, they are in two parts; with
    `bf16`, weights are rounded to bfloat16."""
    matrix, row = x // task.used, x % task.used
    begin, end = load_index(task.seen + 8 * row), load_index(task.seen + 8 * row + 4)
    source = (matrix * task.height + row) * task.keys
    first = begin // LANES * LANES
    highest = broadcast(HIDDEN)
    near_place, lost_place, scale = task.source, task.lost, broadcast(task.scale)
    for key in range(first, end, LANES):
        if sums:
            near = load_bf16(near_place + 2 * (source + key))
            scores = add(near, load_bf16(lost_place + 2 * (source + key)))
            scores = multiply(scores, scale)
        else:
            scores = load(near_place + 4 * (source + key))
        if begin > key or end < key + LANES:
            scores = only_lanes(scores, begin - key, end - key, HIDDEN)
        highest = larger(highest, scores)
        store(scratch + 4 * key, scores)
    sink = load_number(task.sinks + 4 * x) if task.sinks else HIDDEN
    factor = _exponentials(scratch, first, end, highest, sink)
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
