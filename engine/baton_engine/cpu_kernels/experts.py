"""The experts of a step on a CPU: two compiled products over all of them, and a token's sum.

In: rows x [T, D], and the experts of each with their weights. Out: [T, D].

Pairs of a token and one of its experts are sorted by expert, so that an expert's weights are read
once per step. The weights are packed in blocks of 64 outputs. A block fits the cache, and is
multiplied with all rows of its expert, six at a time. Threads take in turn what is a block of an
expert and a part of its rows: first for gate and up, whose inner numbers follow at once, then for
down. Who finishes the last part of a block of down adds up the outputs of each token's experts.

An output is one chain of additions over the inputs, in the same order for any number of rows, and a
token's experts are added one by one in float32. So the bits of a token depend neither on others nor
on the threads. In bfloat16 all sums are float32; the outputs of gate and up, the inner numbers and
the outputs of an expert are rounded, as by separate operations.

Measured on an AMD EPYC (Zen 4, with AVX-512 BF16) with weights of 32 experts, 768 x 576: one thread
computes 100 GFLOP/s in float32 and 190 in bfloat16, which are the CPU's limits; steps of 8 and 32
tokens read their weights at 18 to 23 GB/s, where a sum over a large array reads 20 to 24.

Shapes: T tokens, D hidden size, E experts, C experts of a token, F inner size of an expert,
G = 2 F, P = T C pairs, U parts of experts; B blocks, I words of 32 bits of a row
(one float32 or two bfloat16), W outputs of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from baton_engine.cpu_kernels.llvm_values import LANES
from baton_engine.cpu_kernels.numbers import ONE, exponential, number_at, store_numbers
from baton_engine.cpu_kernels.openmp import (
    COUNTER,
    NONE_TAKEN,
    inlined,
    keep_until_here,
    run_kernel,
    task_class,
)
from baton_engine.cpu_kernels.silu import silu_product
from baton_engine.cpu_kernels.vectors import (
    COLUMNS,
    add,
    block_product,
    broadcast,
    count_finished,
    divide,
    larger,
    load,
    load_address,
    load_number,
    multiply,
    rounded_to_bf16,
    smaller,
    store_address,
    subtract,
    take_next,
    zeros,
)
from baton_engine.memory.huge_pages import ask_for_huge_pages

WORD = 4
# Rows that are multiplied together, and their bytes of sums.
ROWS, ROW_SUMS = 6, 4 * COLUMNS
# Gates of a block, which has as many outputs of up after them.
GATES = COLUMNS // 2
# Pairs of an expert that a thread computes at a time, at most.
PART_PAIRS = 192

# NUMBA_CPU_NAME compiles for another CPU than this one.
_FEATURES = {} if numba.config.CPU_NAME else llvm.get_host_cpu_features()
_NATIVE, _WIDE = (bool(_FEATURES.get(name)) for name in ("avx512bf16", "avx512f"))
_ONE_ROW, _TWO_ROWS, _FOUR_ROWS, _SIX_ROWS = (
    block_product(rows, False, False, _WIDE) for rows in (1, 2, 4, 6)
)
_ONE_BF16_ROW, _TWO_BF16_ROWS, _FOUR_BF16_ROWS, _SIX_BF16_ROWS = (
    block_product(rows, True, _NATIVE, _WIDE) for rows in (1, 2, 4, 6)
)

# The argument of both kernels. The addresses are of arrays: `parts` int64 [U, 3], an expert and its
# pairs [begin, end); `order` int64 [P], the sorted pairs; `weights` [E, B, I, 64]; `bias` float32
# [E, B, 64], or 0; `source` and `target`, rows of `inputs` and `outputs` numbers. Outputs of down
# have the order of unsorted pairs. They are added up, each times one of `factors` float32 [P], in
# `sums` [T, `outputs`], when `finished` int64 [B] has counted all parts of a block.
_Experts = task_class(
    [
        COUNTER,
        *((name, np.int64) for name in ("tokens", "chosen", "part_count", "parts", "order")),
        *(("clamped", np.int64), ("alpha", np.float32), ("limit", np.float32)),
        *((name, np.int64) for name in ("factors", "finished", "sums")),
        *((name, np.int64) for name in ("blocks", "words", "weights", "bias")),
        *((name, np.int64) for name in ("source", "inputs", "target", "outputs")),
    ]
)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Weights in blocks. Outputs and inputs that complete a block or a word are 0. `clamp` has
    alpha and the limit of a clamped gate."""

    gate_up_EBIW: torch.Tensor  # int32; the outputs of a block are 32 gates and their 32 ups
    down_EBIW: torch.Tensor
    gate_up_bias_EBW: torch.Tensor | None  # float32
    down_bias_EBW: torch.Tensor | None
    dtype: torch.dtype
    hidden: int
    clamp: tuple[float, float] | None


def can_pack(weights: torch.Tensor) -> bool:
    return weights.device.type == "cpu" and weights.dtype in (torch.float32, torch.bfloat16)


def pack_experts(
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    gate_up_bias_EG: torch.Tensor | None,
    down_bias_ED: torch.Tensor | None,
    clamp: tuple[float, float] | None,
) -> PackedExperts:
    """Pack the weights, in their own memory where they are whole blocks."""
    return PackedExperts(
        _packed(gate_up_EGD, 2),
        _packed(down_EDF, 1),
        None if gate_up_bias_EG is None else _packed_bias(gate_up_bias_EG, 2),
        None if down_bias_ED is None else _packed_bias(down_bias_ED, 1),
        gate_up_EGD.dtype,
        gate_up_EGD.shape[2],
        clamp,
    )


def multiply_experts(
    x_TD: torch.Tensor, ids_TC: torch.Tensor, weights_TC: torch.Tensor, packed: PackedExperts
) -> torch.Tensor:
    """The sum [T, D] of the outputs of each token's experts, times their weights."""
    tokens, hidden = x_TD.shape
    if not tokens:
        return torch.empty_like(x_TD)
    pairs, dtype = ids_TC.numel(), packed.dtype
    _, inner_blocks, words, _ = packed.gate_up_EBIW.shape
    blocks = packed.down_EBIW.shape[1]
    missing = words * WORD // dtype.itemsize - hidden
    x_TD = F.pad(x_TD, (0, missing)) if missing else x_TD.contiguous()
    weights_TC = weights_TC.contiguous()
    order_P, parts_U3 = sorted_pairs(ids_TC.numpy().reshape(-1))
    inner_PF = torch.empty(pairs, inner_blocks * GATES, dtype=dtype)
    out_PD = torch.empty(pairs, blocks * COLUMNS, dtype=dtype)
    out_TD = torch.empty(tokens, blocks * COLUMNS, dtype=dtype)
    finished_B = np.zeros(blocks, np.int64)
    common = (
        *(NONE_TAKEN, *ids_TC.shape, len(parts_U3), parts_U3.ctypes.data, order_P.ctypes.data),
        *(packed.clamp is not None, *(packed.clamp or (0.0, 0.0))),
        *(weights_TC.data_ptr(), finished_B.ctypes.data, out_TD.data_ptr()),
    )
    bf16 = dtype == torch.bfloat16
    task = _Experts(
        *(*common, *_places(packed.gate_up_EBIW, packed.gate_up_bias_EBW)),
        *(*_rows(x_TD), *_rows(inner_PF)),
    )
    run_kernel(bf16_gate_up if bf16 else fp32_gate_up, task)
    task = _Experts(
        *(*common, *_places(packed.down_EBIW, packed.down_bias_EBW)),
        *(*_rows(inner_PF), *_rows(out_PD)),
    )
    run_kernel(bf16_down if bf16 else fp32_down, task)
    return out_TD if out_TD.shape[1] == hidden else out_TD[:, :hidden].contiguous()


def _places(weights_EBIW: torch.Tensor, bias_EBW: torch.Tensor | None) -> tuple[int, ...]:
    bias = 0 if bias_EBW is None else bias_EBW.data_ptr()
    return (*weights_EBIW.shape[1:3], weights_EBIW.data_ptr(), bias)


def _rows(array: torch.Tensor) -> tuple[int, int]:
    return array.data_ptr(), array.shape[1]


def sorted_pairs(
    ids_P: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The pairs in the order of their experts, and the parts of experts."""
    counts = np.bincount(ids_P)
    used = np.flatnonzero(counts)
    counts = counts[used]
    ends = counts.cumsum()
    begins = ends - counts
    if counts.max() > PART_PAIRS:
        parts = -(-counts // PART_PAIRS)
        each = np.arange(len(used)).repeat(parts)
        before = np.arange(len(each)) - (parts.cumsum() - parts)[each]
        begins = begins[each] + before * PART_PAIRS
        used, ends = used[each], np.minimum(begins + PART_PAIRS, ends[each])
    return ids_P.argsort(kind="stable"), np.stack([used, begins, ends], 1)


def _packed(weight_EOI: torch.Tensor, parts: int) -> torch.Tensor:
    """[E, B, I, 64] words of a weight whose outputs are in `parts` parts."""
    experts, outputs, inputs = weight_EOI.shape
    outputs //= parts
    missing_inputs = -inputs % (WORD // weight_EOI.element_size())
    missing = -outputs % (COLUMNS // parts)
    words = (inputs + missing_inputs) * weight_EOI.element_size() // WORD
    shape = ((outputs + missing) * parts // COLUMNS, words, COLUMNS)
    if missing or missing_inputs or not weight_EOI.is_contiguous():
        packed = torch.empty(experts, *shape, dtype=torch.int32)
        ask_for_huge_pages(packed.data_ptr(), packed.nbytes)
    else:
        packed = weight_EOI.view(torch.int32).view(experts, *shape)
    for weight_OI, target_BIW in zip(weight_EOI, packed, strict=True):
        rows = F.pad(weight_OI.reshape(parts, outputs, inputs), (0, missing_inputs, 0, missing))
        words_PBOI = rows.view(torch.int32).view(parts, shape[0], COLUMNS // parts, words)
        # A copy of its own: the target may be the same memory.
        target_BIW.copy_(words_PBOI.permute(1, 3, 0, 2).reshape(shape).clone())
    return packed


def _packed_bias(bias_EO: torch.Tensor, parts: int) -> torch.Tensor:
    bias = bias_EO.float().view(len(bias_EO), parts, -1)
    bias = F.pad(bias, (0, -bias.shape[2] % (COLUMNS // parts)))
    blocks = bias.view(len(bias_EO), parts, -1, COLUMNS // parts).transpose(1, 2)
    return blocks.reshape(len(bias_EO), -1, COLUMNS)


def fp32_gate_up(pointer: Any) -> None:
    _gate_up(pointer, False)


def bf16_gate_up(pointer: Any) -> None:
    _gate_up(pointer, True)


def fp32_down(pointer: Any) -> None:
    _down(pointer, False)


def bf16_down(pointer: Any) -> None:
    _down(pointer, True)


@inlined
def _gate_up(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    row_bytes = task.inputs * (2 if bf16 else 4)
    memory = np.empty(ROWS * (ROW_SUMS + 8), np.uint8)
    sums = memory.ctypes.data
    places = sums + ROWS * ROW_SUMS
    turn = take_next(pointer)
    while turn < task.part_count * task.blocks:
        part, block = turn // task.blocks, turn % task.blocks
        weights, bias, begin, end = _part(task, part, block)
        for pair in range(begin, end, ROWS):
            count = min(ROWS, end - pair)
            for row in range(ROWS):
                token = load_address(task.order + 8 * (pair + min(row, count - 1))) // task.chosen
                store_address(places + 8 * row, task.source + token * row_bytes)
            _multiply(weights, places, count, task.words, sums, bf16)
            for row in range(count):
                target = (pair + row) * task.outputs + block * GATES
                for place in range(0, GATES, LANES):
                    gate = _rounded(_output(sums, bias, row, place), bf16)
                    up = _rounded(_output(sums, bias, row, GATES + place), bf16)
                    inner = _rounded(_gated(task, gate, up), bf16)
                    store_numbers(task.target, target + place, inner, bf16)
        turn = take_next(pointer)
    keep_until_here(memory)


@inlined
def _down(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    row_bytes = task.inputs * (2 if bf16 else 4)
    memory = np.empty(ROWS * (ROW_SUMS + 8), np.uint8)
    sums = memory.ctypes.data
    places = sums + ROWS * ROW_SUMS
    turn = take_next(pointer)
    while turn < task.part_count * task.blocks:
        part, block = turn // task.blocks, turn % task.blocks
        weights, bias, begin, end = _part(task, part, block)
        for pair in range(begin, end, ROWS):
            count = min(ROWS, end - pair)
            for row in range(ROWS):
                source = task.source + (pair + min(row, count - 1)) * row_bytes
                store_address(places + 8 * row, source)
            _multiply(weights, places, count, task.words, sums, bf16)
            for row in range(count):
                target = load_address(task.order + 8 * (pair + row)) * task.outputs
                for place in range(0, COLUMNS, LANES):
                    output = _rounded(_output(sums, bias, row, place), bf16)
                    store_numbers(task.target, target + block * COLUMNS + place, output, bf16)
        if count_finished(task.finished + 8 * block) == task.part_count - 1:
            _add_experts(task, block, bf16)
        turn = take_next(pointer)
    keep_until_here(memory)


@inlined
def _add_experts(task: Any, block: int, bf16: bool) -> None:
    """The weighted sums of each token's experts for a block of outputs."""
    for token in range(task.tokens):
        for column in range(block * COLUMNS, (block + 1) * COLUMNS, LANES):
            total = zeros()
            for pair in range(token * task.chosen, (token + 1) * task.chosen):
                output = number_at(task.target, pair * task.outputs + column, bf16)
                factor = broadcast(load_number(task.factors + 4 * pair))
                total = add(total, multiply(output, factor))
            store_numbers(task.sums, token * task.outputs + column, _rounded(total, bf16), bf16)


@inlined
def _part(task: Any, part: int, block: int) -> Any:
    """The addresses of the weights and biases of a part's block, and its pairs [begin, end)."""
    place = task.parts + 24 * part
    index = load_address(place) * task.blocks + block
    weights = task.weights + index * task.words * ROW_SUMS
    bias = task.bias + index * ROW_SUMS if task.bias != 0 else 0
    return weights, bias, load_address(place + 8), load_address(place + 16)


@inlined
def _multiply(weights: int, places: int, count: int, words: int, sums: int, bf16: bool) -> None:
    """The sums of up to six rows."""
    if bf16:
        if count > 4:
            _SIX_BF16_ROWS(weights, places, words, sums)
        elif count > 2:
            _FOUR_BF16_ROWS(weights, places, words, sums)
        elif count > 1:
            _TWO_BF16_ROWS(weights, places, words, sums)
        else:
            _ONE_BF16_ROW(weights, places, words, sums)
    elif count > 4:
        _SIX_ROWS(weights, places, words, sums)
    elif count > 2:
        _FOUR_ROWS(weights, places, words, sums)
    elif count > 1:
        _TWO_ROWS(weights, places, words, sums)
    else:
        _ONE_ROW(weights, places, words, sums)


@inlined
def _output(sums: int, bias: int, row: int, place: int) -> Any:
    """16 outputs of a row."""
    values = load(sums + row * ROW_SUMS + 4 * place)
    return add(values, load(bias + 4 * place)) if bias != 0 else values


@inlined
def _rounded(values: Any, bf16: bool) -> Any:
    return rounded_to_bf16(values) if bf16 else values


@inlined
def _gated(task: Any, gate: Any, up: Any) -> Any:
    if not task.clamped:
        return silu_product(gate, up)
    limit = broadcast(task.limit)
    gate = smaller(gate, limit)
    up = larger(smaller(up, limit), subtract(zeros(), limit))
    scaled = multiply(gate, broadcast(task.alpha))
    sigmoid = divide(broadcast(ONE), add(broadcast(ONE), exponential(subtract(zeros(), scaled))))
    return multiply(add(up, broadcast(ONE)), multiply(gate, sigmoid))
