"""Compiled softmax of attention's scores, with the same bits for a number at any place.

torch's softmax divides a row among as many sums as fit its registers. These kernels add every row
in the same order.

Weights by split need no other split's scores, so a kernel of decode reads a key once: they are
exp(score - largest of the split), and the splits' sums get factors as they are added (see
SplitFactors). Layers with latent rows have these.

Shapes: X matrices of Y rows, of which M are used, L scores of a row, C splits of S keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import ONE, ZERO, exponential
from baton_engine.cpu_kernels.openmp import COUNTER, NONE_TAKEN, inlined, run_kernel, task_class
from baton_engine.cpu_kernels.vectors import (
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
    store_number,
    subtract,
    take_next,
    zeros,
)

# The argument of the softmax kernels. `source` is the address of float32 scores [X, Y, L], or that
# of a bfloat16 array whose sum with `lost` is the scores. `seen` is the address of int32 [M, 2]: of
# each row, the keys [begin, end) that it sees. `sinks` is the address of float32 [X, M], or 0 if
# rows have no sink. Weights go to `target`, [X, C, Y, S]. If `factors` is not 0, they are weights
# by split, and it is the address of SplitFactors.factors_XMC2.
_Softmax = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("matrices", "used", "height", "keys", "split")),
        *((name, np.int64) for name in ("source", "lost", "seen", "sinks", "target", "factors")),
        ("scale", np.float32),
    ]
)
HIDDEN = np.float32(-np.inf)
# Rows that a thread takes at a time.
SOME_ROWS = 8


@dataclass(frozen=True, slots=True)
class SplitFactors:
    """How sums of V with weights by split are added: sum = sum * decay + sum of a split * weight,
    with the pairs (decay, weight) of the splits in turn. The last pair has the factor of the result
    instead of a decay. float32 [X, M, C + 1, 2]."""

    factors_XMC2: torch.Tensor

    @classmethod
    def empty(cls, matrices: int, rows: int, splits: int) -> SplitFactors:
        return cls(torch.empty(matrices, rows, splits + 1, 2))


def softmax_(scores_TL: torch.Tensor, sinks_T: torch.Tensor | None = None) -> torch.Tensor:
    """Replace float32 scores of a CPU by their softmax. L must be a multiple of 16. A score of -inf
    gets a weight of exactly 0, so the bits of the others do not depend on how many such scores
    there are, if 16 follow each other. A row's sink is one more score, whose weight is left out."""
    rows, keys = scores_TL.shape
    seen = np.array([(0, keys)], np.int32)
    place, sinks = scores_TL.data_ptr(), _address(sinks_T)
    task = _Softmax(
        NONE_TAKEN, rows, 1, 1, keys, keys, place, 0, seen.ctypes.data, sinks, place, 0, 1.0
    )
    run_kernel(fp32_softmax, task)
    return scores_TL


def prompt_weights(
    scores: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    seen_M2: npt.NDArray[np.int32],
    split: int,
    dtype: torch.dtype,
    scale: float = 1.0,
    sinks_XM: torch.Tensor | None = None,
    factors: SplitFactors | None = None,
) -> torch.Tensor:
    """The softmax [X, C, Y, S], in the dtype of V, of scores [X, Y, L] of the keys that each row
    sees: float32 scores, or two bfloat16 parts whose sum times `scale` they are. Rows from M on are
    not set. Sinks are those of softmax_(). With `factors`, which are filled, the result is weights
    by split."""
    assert factors is None or sinks_XM is None, "weights by split of rows with sinks"
    if dtype not in (torch.float32, torch.bfloat16):
        wide = prompt_weights(scores, seen_M2, split, torch.float32, scale, sinks_XM, factors)
        return wide.to(dtype)
    near_XYL, lost_XYL = scores if isinstance(scores, tuple) else (scores, scores)
    matrices, height, keys = near_XYL.shape
    weights_XCYS = torch.empty(matrices, keys // split, height, split, dtype=dtype)
    task = _Softmax(
        *(NONE_TAKEN, matrices, len(seen_M2), height, keys, split, near_XYL.data_ptr()),
        *(lost_XYL.data_ptr(), seen_M2.ctypes.data, _address(sinks_XM)),
        *(
            weights_XCYS.data_ptr(),
            0 if factors is None else factors.factors_XMC2.data_ptr(),
            scale,
        ),
    )
    if isinstance(scores, tuple):
        function = bf16_softmax_of_sums
    else:
        function = bf16_softmax if dtype == torch.bfloat16 else fp32_softmax
    run_kernel(function, task)
    return weights_XCYS


def split_weights_(scores_XML: torch.Tensor, split: int, factors: SplitFactors) -> None:
    """Replace scores of keys by weights by split, and fill `factors`. Scores of -inf are those of
    keys that a row does not see."""
    keys = scores_XML.shape[-1]
    rows = scores_XML.numel() // keys
    seen, place = np.array([(0, keys)], np.int32), scores_XML.data_ptr()
    task = _Softmax(
        *(NONE_TAKEN, rows, 1, 1, keys, split, place, 0, seen.ctypes.data, 0, place),
        *(factors.factors_XMC2.data_ptr(), 1.0),
    )
    run_kernel(fp32_softmax, task)


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
def split_exponentials(place: int, first: int, end: int) -> Any:
    """Replace the scores of keys [first, end) of a split by exp(score - largest). Returns the
    largest score and the sum of the weights: HIDDEN and 0 if all keys are hidden."""
    highest = broadcast(HIDDEN)
    for key in range(first, end, LANES):
        highest = larger(highest, load(place + 4 * key))
    most, total = HIDDEN, zeros()
    for lane in lanes_of(highest):
        if lane > most:
            most = lane
    base = broadcast(most if most > HIDDEN else ZERO)
    for key in range(first, end, LANES):
        weights = exponential(subtract(load(place + 4 * key), base))
        total = add(total, weights)
        store(place + 4 * key, weights)
    whole = ZERO
    for lane in lanes_of(total):
        whole += lane
    return most, whole


@inlined
def joined(top: Any, total: Any, part_top: Any, part_total: Any) -> Any:
    """The largest score and the sum of weights of a row with one more split, and the factors of the
    sums of earlier splits and of this one."""
    most = part_top if part_top > top else top
    base = most if most > HIDDEN else ZERO
    decay = lanes_of(exponential(broadcast(top - base)))[0]
    weight = lanes_of(exponential(broadcast(part_top - base)))[0]
    return most, total * decay + part_total * weight, decay, weight


@inlined
def _split_weights(
    scratch: int, first: int, end: int, split: int, factors: int, splits: int
) -> None:
    """Replace the scores of keys [first, end) of a row by weights by split, and write the row's
    factors."""
    top, total = HIDDEN, ZERO
    for number in range(splits):
        low, high = max(first, number * split), min(end, (number + 1) * split)
        decay, weight = ONE, ZERO
        if low < high:
            part_top, part_total = split_exponentials(scratch, low, high)
            top, total, decay, weight = joined(top, total, part_top, part_total)
        store_number(factors + 8 * number, decay)
        store_number(factors + 8 * number + 4, weight)
    store_number(factors + 8 * splits, ONE / total)
    store_number(factors + 8 * splits + 4, ZERO)


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
    height, split, target = task.height, task.split, task.target
    splits = task.keys // split
    if task.factors:
        factors = task.factors + 8 * x * (splits + 1)
        _split_weights(scratch, first, end, split, factors, splits)
        factor = broadcast(ONE)
    else:
        sink = load_number(task.sinks + 4 * x) if task.sinks else HIDDEN
        factor = _exponentials(scratch, first, end, highest, sink)
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
