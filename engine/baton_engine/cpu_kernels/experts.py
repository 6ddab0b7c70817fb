"""The experts of a step on a CPU: two compiled products over all of them, and a token's sum.

In: rows x [T, D], and the experts of each with their weights. Out: [T, D].

Pairs of a token and one of its experts are sorted by expert, so that an expert's weights are read
once per step. The weights are packed in blocks of 64 outputs. A block fits the cache, and is
multiplied with all rows of its expert, six at a time. Threads take blocks in turn: for gate and up
one of an expert, whose inner numbers follow at once; for down one of all experts in ascending
order, whose outputs are added up at once.

An output is one chain of additions over the inputs, in the same order for any number of rows, and a
token's experts are added one by one in float32. So the bits of a token depend neither on others nor
on the threads. In bfloat16 all sums are float32; the outputs of gate and up, the inner numbers and
the outputs of an expert are rounded, as by separate operations.

Measured on an AMD EPYC (Zen 4) with weights of 32 experts, 768 x 576: one thread computes 98
GFLOP/s in float32, and 190 in bfloat16, which are the CPU's limits; steps of 1 to 32 tokens read
15 to 17 GB/s, as a sum over a large array does.

Shapes: T tokens, D hidden size, E experts, C experts of a token, F inner size of an expert,
G = 2 F, P = T C pairs, U used experts, S ranges of tokens; B blocks, I words of 32 bits of a row
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

from baton_engine.cpu_kernels.numbers import ONE, exponential, store_numbers
from baton_engine.cpu_kernels.openmp import COUNTER, NONE_TAKEN, inlined, run_kernel
from baton_engine.cpu_kernels.silu import silu_product
from baton_engine.cpu_kernels.vectors import (
    COLUMNS,
    LANES,
    add,
    block_product,
    broadcast,
    divide,
    larger,
    load,
    load_index,
    load_number,
    multiply,
    rounded_to_bf16,
    smaller,
    store,
    store_address,
    subtract,
    take_next,
    zeros,
)

WORD = 4
# Rows that are multiplied together, and their bytes of sums.
ROWS, ROW_SUMS = 6, 4 * COLUMNS
# Gates of a block, which has as many outputs of up after them.
GATES = COLUMNS // 2
# Tokens whose experts are added up by one thread for a block: at most, and at least if there are
# few blocks per thread.
MOST_TOKENS, LEAST_TOKENS = 512, 64
THREAD_BLOCKS = 4

_FEATURES = llvm.get_host_cpu_features()
_NATIVE, _WIDE = (bool(_FEATURES.get(name)) for name in ("avx512bf16", "avx512f"))
_ONE_ROW, _TWO_ROWS, _FOUR_ROWS, _SIX_ROWS = (
    block_product(rows, False, False, _WIDE) for rows in (1, 2, 4, 6)
)
_ONE_BF16_ROW, _TWO_BF16_ROWS, _FOUR_BF16_ROWS, _SIX_BF16_ROWS = (
    block_product(rows, True, _NATIVE, _WIDE) for rows in (1, 2, 4, 6)
)

# The argument of both kernels. The addresses are of arrays: `experts` int32 [U], the used experts;
# `begins` int32 [S + 1, U], each one's first pair of a range of `range` tokens, and its end;
# `pair_tokens` int32 [P] and `factors` float32 [P] of the sorted pairs; `weights` [E, B, I, 64];
# `bias` float32 [E, B, 64], or 0; `source` and `target`, rows of `inputs` and `outputs` numbers.
_EXPERTS = np.dtype(
    [
        COUNTER,
        *((name, np.int64) for name in ("used", "ranges", "range", "tokens")),
        *((name, np.int64) for name in ("experts", "begins", "pair_tokens", "factors")),
        *(("clamped", np.int64), ("alpha", np.float32), ("limit", np.float32)),
        *((name, np.int64) for name in ("blocks", "words", "weights", "bias")),
        *((name, np.int64) for name in ("source", "inputs", "target", "outputs")),
    ],
    align=True,
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
    """The sum [T, D] of the outputs of each token's experts, times their weights. The ids of a
    token's experts ascend."""
    tokens, hidden = x_TD.shape
    if not tokens:
        return torch.empty_like(x_TD)
    _, inner_blocks, words, _ = packed.gate_up_EBIW.shape
    blocks = packed.down_EBIW.shape[1]
    missing = words * WORD // packed.dtype.itemsize - hidden
    x_TD = F.pad(x_TD, (0, missing)) if missing else x_TD.contiguous()
    size = _range_size(tokens, blocks)
    order_P, used_U, begins_SU = _sorted(ids_TC.numpy(), size)
    tokens_P = (order_P // ids_TC.shape[1]).astype(np.int32)
    factors_P = weights_TC.numpy().reshape(-1)[order_P]
    inner_PF = torch.empty(len(order_P), inner_blocks * GATES, dtype=packed.dtype)
    out_TD = torch.empty(tokens, blocks * COLUMNS, dtype=packed.dtype)
    common = (
        *(len(used_U), len(begins_SU) - 1, size, tokens),
        *(each.ctypes.data for each in (used_U, begins_SU, tokens_P, factors_P)),
        *(packed.clamp is not None, *(packed.clamp or (0.0, 0.0))),
    )
    bf16 = packed.dtype == torch.bfloat16
    task = np.zeros(1, _EXPERTS)
    task[0] = (
        *(NONE_TAKEN, *common, *_places(packed.gate_up_EBIW, packed.gate_up_bias_EBW)),
        *(*_rows(x_TD), *_rows(inner_PF)),
    )
    run_kernel(bf16_gate_up if bf16 else fp32_gate_up, task)
    task[0] = (
        *(NONE_TAKEN, *common, *_places(packed.down_EBIW, packed.down_bias_EBW)),
        *(*_rows(inner_PF), *_rows(out_TD)),
    )
    run_kernel(bf16_down if bf16 else fp32_down, task)
    return out_TD if out_TD.shape[1] == hidden else out_TD[:, :hidden].contiguous()


def _places(weights_EBIW: torch.Tensor, bias_EBW: torch.Tensor | None) -> tuple[int, ...]:
    bias = 0 if bias_EBW is None else bias_EBW.data_ptr()
    return (*weights_EBIW.shape[1:3], weights_EBIW.data_ptr(), bias)


def _rows(array: torch.Tensor) -> tuple[int, int]:
    return array.data_ptr(), array.shape[1]


def _sorted(
    ids_TC: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The pairs in ascending order of expert and token; the experts that have some; and where the
    pairs of each range of `size` tokens begin."""
    tokens, chosen = ids_TC.shape
    flat_P = ids_TC.reshape(-1)
    order_P = flat_P.argsort(kind="stable")
    used_U = np.flatnonzero(np.bincount(flat_P))
    keys_P = flat_P[order_P] * tokens + order_P // chosen
    firsts_S = np.minimum(np.arange(0, tokens + size, size), tokens)
    begins_SU = keys_P.searchsorted(used_U * tokens + firsts_S[:, None])
    return order_P, used_U.astype(np.int32), begins_SU.astype(np.int32)


def _range_size(tokens: int, blocks: int) -> int:
    """Tokens of a range: all, unless threads would have too little to share."""
    ranges = max(-(-tokens // MOST_TOKENS), THREAD_BLOCKS * torch.get_num_threads() // blocks, 1)
    return max(-(-tokens // ranges), min(tokens, LEAST_TOKENS), 1)


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
    else:
        packed = weight_EOI.view(torch.int32).view(experts, *shape)
    for weight_OI, target_BIW in zip(weight_EOI, packed, strict=True):
        rows = F.pad(weight_OI.view(parts, outputs, inputs), (0, missing_inputs, 0, missing))
        words_PBOI = rows.view(torch.int32).view(parts, shape[0], COLUMNS // parts, words)
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
    last = task.begins + 4 * task.ranges * task.used
    turn = take_next(pointer)
    while turn < task.used * task.blocks:
        number, block = turn // task.blocks, turn % task.blocks
        weights, bias = _block(task, number, block)
        end = load_index(last + 4 * number)
        for pair in range(load_index(task.begins + 4 * number), end, ROWS):
            count = min(ROWS, end - pair)
            for row in range(ROWS):
                token = load_index(task.pair_tokens + 4 * (pair + min(row, count - 1)))
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


@inlined
def _down(pointer: Any, bf16: bool) -> None:
    task = numba.carray(pointer, 1)[0]
    row_bytes = task.inputs * (2 if bf16 else 4)
    memory = np.empty(ROWS * (ROW_SUMS + 8) + task.range * ROW_SUMS, np.uint8)
    sums = memory.ctypes.data
    places = sums + ROWS * ROW_SUMS
    totals = places + ROWS * 8
    turn = take_next(pointer)
    while turn < task.ranges * task.blocks:
        part, block = turn // task.blocks, turn % task.blocks
        first = part * task.range
        tokens = min(task.range, task.tokens - first)
        for place in range(0, tokens * ROW_SUMS, 4 * LANES):
            store(totals + place, zeros())
        begins = task.begins + 4 * part * task.used
        for number in range(task.used):
            weights, bias = _block(task, number, block)
            end = load_index(begins + 4 * (task.used + number))
            for pair in range(load_index(begins + 4 * number), end, ROWS):
                count = min(ROWS, end - pair)
                for row in range(ROWS):
                    source = task.source + (pair + min(row, count - 1)) * row_bytes
                    store_address(places + 8 * row, source)
                _multiply(weights, places, count, task.words, sums, bf16)
                for row in range(count):
                    token = load_index(task.pair_tokens + 4 * (pair + row)) - first
                    factor = broadcast(load_number(task.factors + 4 * (pair + row)))
                    for place in range(0, COLUMNS, LANES):
                        output = _rounded(_output(sums, bias, row, place), bf16)
                        total = totals + token * ROW_SUMS + 4 * place
                        store(total, add(load(total), multiply(output, factor)))
        for token in range(tokens):
            target = (first + token) * task.outputs + block * COLUMNS
            for place in range(0, COLUMNS, LANES):
                total = _rounded(load(totals + token * ROW_SUMS + 4 * place), bf16)
                store_numbers(task.target, target + place, total, bf16)
        turn = take_next(pointer)


@inlined
def _block(task: Any, number: int, block: int) -> Any:
    """The addresses of a block's weights and biases of a used expert."""
    index = load_index(task.experts + 4 * number) * task.blocks + block
    bias = task.bias + index * ROW_SUMS if task.bias != 0 else 0
    return task.weights + index * task.words * ROW_SUMS, bias


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
