"""Products with quantized weights on a GPU, with a fixed tile: a row has the same bits whatever
rows are beside it. Torch twin: `quantized_weight.quantized_twin`.

In: x in float32 or 16 bits, and a weight. Out: the product, rounded once from float32. Codes stay 4
or 8 bits in memory, and become numbers of x's dtype in registers. All of them are exact in 16 bits,
except those of NF4, which are rounded. A scale is multiplied with the float32 sum of its group. An
output of weights and an input of rows are a program's left and right factor: tensor cores take the
left one from registers.

Splits are those of `triton_matmul`: they depend on the weight's shape only. The tile has more rows
in larger steps, but each sum is computed in the same order.

Shapes: T rows, O and I a weight's output and input size, with padding, B bytes of a row's codes,
G groups of inputs, S splits, U units of inputs whose sums shifts are multiplied with. In a program:
N outputs, M rows, H inputs of half a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_engine.attention.exact.row_rule import Product
from baton_engine.layers.linear_method import HEAD, LinearMethod
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight
from baton_engine.layers.triton_quantized.inputs import Prepared, prepare
from baton_engine.layers.triton_quantized.weight import TritonWeight, triton_weight
from baton_engine.layers.triton_splits import STORED_ROWS, add_splits, split_steps

# Numbers of rows that a test compares: those of each tile, and the first and last of some.
COUNTS = (1, 16, 17, 64, 100, STORED_ROWS + 1)


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    outputs: int
    stages: int
    warps: int


# In float32 there are no tensor cores: larger tiles overflow into memory.
TILE_32_BITS = Tile(rows=16, outputs=32, stages=2, warps=4)
# For steps of 16 rows, for STORED_ROWS and for more.
FEW_ROWS = Tile(rows=16, outputs=64, stages=4, warps=4)
SOME_ROWS = Tile(rows=64, outputs=64, stages=3, warps=4)
MANY_ROWS = Tile(rows=64, outputs=128, stages=3, warps=8)


def tile_of(rows: int, dtype: torch.dtype) -> Tile:
    """The tile of a step of this number of rows."""
    if dtype == torch.float32:
        return TILE_32_BITS
    if rows <= FEW_ROWS.rows:
        return FEW_ROWS
    return SOME_ROWS if rows <= STORED_ROWS else MANY_ROWS


def split_of(weight: TritonWeight) -> int:
    """The number of inputs in a split, whole steps."""
    halves = -(-weight.inputs.places // weight.half)
    split = split_steps(halves, -(-weight.outputs // FEW_ROWS.outputs))
    return (split + split % 2) * weight.half


def quantized_tile_product(
    quantized: QuantizedWeight, bias_O: torch.Tensor | None, dtype: torch.dtype | None = None
) -> Product:
    """The product, with results in `dtype`, by default x's."""
    weight = triton_weight(quantized)
    outputs, split = weight.outputs, split_of(weight)
    splits = -(-weight.inputs.places // split)

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        rows, device = len(x_TI), x_TI.device
        tile, inputs = tile_of(rows, x_TI.dtype), prepare(x_TI, weight.inputs)
        out_TO = torch.empty(rows, outputs, dtype=dtype or x_TI.dtype, device=device)
        stored = splits > 1 and rows <= STORED_ROWS
        sums = out_TO
        if stored:
            sums = torch.empty(splits, rows, outputs, dtype=torch.float32, device=device)
        grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))
        _quantized_matmul[(*grid, splits if stored else 1)](
            *(sums, *tensors_of(weight, inputs, bias_O), rows),
            **weight.constants,
            SPLIT=split,
            SPLITS=splits,
            STORED=stored,
            HAS_BIAS=bias_O is not None,
            N=tile.outputs,
            M=tile.rows,
            num_stages=tile.stages,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
        if stored:
            add_splits(out_TO, sums, bias_O)
        return out_TO

    return product


QUANTIZED_TILE = LinearMethod(quantized_tile_product, any_rows=True, counts=COUNTS)
QUANTIZED_TILE_HEAD = LinearMethod(
    lambda weight_VD, bias_V: quantized_tile_product(weight_VD, bias_V, torch.float32),
    any_rows=True,
    counts=COUNTS,
)


def quantized_tile_method(name: str) -> LinearMethod:
    return QUANTIZED_TILE_HEAD if name == HEAD else QUANTIZED_TILE


def tensors_of(
    weight: TritonWeight, inputs: Prepared, bias_O: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """What kernels read, in the order of their arguments; anything for what is missing."""
    x_TP = inputs.x_TP
    table = None if weight.tables is None else weight.tables[x_TP.dtype]
    codes = weight.codes_OB, weight.scales_GO, _or(weight.shifts_GO, x_TP)
    return (
        x_TP,
        _or(inputs.factors_T, x_TP),
        _or(inputs.sums_TU, x_TP),
        *codes,
        _or(table, x_TP),
        _or(bias_O, x_TP),
    )


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


@triton.jit
def _number(
    code_NH: tl.tensor, table: tl.tensor, NUMBERS: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """The numbers of codes in DTYPE. See SMALLER for those of fp8 and fp4."""
    if NUMBERS == "int8":
        number_NH = code_NH.to(DTYPE)
    elif NUMBERS == "nf4":
        number_NH = tl.load(table + code_NH.to(tl.int32))
    elif NUMBERS == "int4":
        # The code is in the last bits of 128, 1024 or 2^23, which goes away again with the offset.
        if tl.bfloat16 == DTYPE:
            number_NH = (code_NH.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        elif tl.float16 == DTYPE:
            number_NH = (code_NH.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        else:
            number_NH = (code_NH.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True)
            number_NH = number_NH - 8388616.0
    else:
        bits_NH = code_NH.to(tl.uint16)
        if NUMBERS == "fp8":
            bits_NH = ((bits_NH & 0x80) << 8) | ((bits_NH & 0x7F) << 7)
        else:
            bits_NH = ((bits_NH & 8) << 12) | ((bits_NH & 7) << 9)
        number_NH = bits_NH.to(tl.float16, bitcast=True).to(DTYPE)
    return number_NH


@triton.jit
def split_sum(
    x_TI: tl.tensor,
    sums_TU: tl.tensor,
    codes_EOB: tl.tensor,
    scales_EGO: tl.tensor,
    shifts_EGO: tl.tensor,
    table: tl.tensor,
    expert: tl.tensor,
    output_N: tl.tensor,
    row_M: tl.tensor,
    first: tl.tensor,
    live_N: tl.tensor,
    live_M: tl.tensor,
    NUMBERS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    SPLIT: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
) -> tl.tensor:
    """The products [N, M] of a split's inputs, from `first` on: those of an expert's outputs with
    rows of x."""
    dtype: tl.constexpr = x_TI.dtype.element_ty
    whole: tl.constexpr = GROUP % (2 * H) == 0  # a step has one scale
    unit: tl.constexpr = 2 * H if whole else H
    input_H = tl.arange(0, H)
    codes_N = codes_EOB + (expert * ROWS + output_N) * ROW_BYTES
    codes_NH = codes_N[:, None] + input_H[None, :]
    scales_N = scales_EGO + expert * GROUPS * ROWS + output_N
    shifts_N = shifts_EGO + expert * GROUPS * ROWS + output_N
    x_HM = x_TI + row_M[None, :] * INPUTS + input_H[:, None]
    sums_M = sums_TU + row_M * ((INPUTS + unit - 1) // unit)
    live_N1, live_1M = live_N[:, None], live_M[None, :]
    acc_NM = tl.zeros([N, M], tl.float32)
    first_N = live_N & (first < INPUTS)
    if GROUP != 0:
        scale_N = tl.load(scales_N + first // GROUP * ROWS, mask=first_N, other=0.0)
    if NUMBERS == "nf4":
        # Triton fetches no codes ahead if they are places in a table.
        both_NH = tl.load(codes_NH + first // 2, mask=first_N[:, None], other=0)
    for step in range(0, SPLIT, 2 * H):
        begin = first + step
        if INPUTS % SPLIT == 0:
            low_HM, high_HM = live_1M, live_1M
            low_NH, high_NH = live_N1, live_N1
            low_N, high_N, low_M, high_M = live_N, live_N, live_M, live_M
        else:
            low_H, high_H = begin + input_H < INPUTS, begin + H + input_H < INPUTS
            low_HM, high_HM = live_1M & low_H[:, None], live_1M & high_H[:, None]
            low_NH, high_NH = live_N1 & low_H[None, :], live_N1 & high_H[None, :]
            low_N, high_N = live_N & (begin < INPUTS), live_N & (begin + H < INPUTS)
            low_M, high_M = live_M & (begin < INPUTS), live_M & (begin + H < INPUTS)
        # The scales of the next step arrive while this one is computed, as do codes of a table.
        after = begin + 2 * H
        next_N = live_N & (step + 2 * H < SPLIT) & (after < INPUTS)
        if GROUP != 0:
            next_scale_N = tl.load(scales_N + after // GROUP * ROWS, mask=next_N, other=0.0)
            if not whole:
                at = (begin + H) // GROUP * ROWS
                high_scale_N = tl.load(scales_N + at, mask=high_N, other=0.0)
        if SHIFTED:
            shift_N = tl.load(shifts_N + begin // GROUP * ROWS, mask=low_N, other=0.0)
            sum_M = tl.load(sums_M + begin // unit, mask=low_M, other=0.0)
            if not whole:
                at = (begin + H) // GROUP * ROWS
                high_shift_N = tl.load(shifts_N + at, mask=high_N, other=0.0)
                high_sum_M = tl.load(sums_M + begin // unit + 1, mask=high_M, other=0.0)
        if NUMBERS == "int8" or NUMBERS == "fp8":
            low_code = tl.load(codes_NH + begin, mask=low_NH, other=0)
            high_code = tl.load(codes_NH + begin + H, mask=high_NH, other=0)
        elif NUMBERS == "nf4":
            low_code, high_code = both_NH & 15, both_NH >> 4
            both_NH = tl.load(codes_NH + after // 2, mask=next_N[:, None], other=0)
        else:
            both_NH = tl.load(codes_NH + begin // 2, mask=low_N[:, None], other=0)
            low_code, high_code = both_NH & 15, both_NH >> 4
        a_HM = tl.load(x_HM + begin, mask=low_HM, other=0.0)
        b_HM = tl.load(x_HM + begin + H, mask=high_HM, other=0.0)
        low = _number(low_code, table, NUMBERS, dtype)
        high = _number(high_code, table, NUMBERS, dtype)
        if GROUP == 0:
            acc_NM = tl.dot(low, a_HM, acc_NM, input_precision="ieee")
            acc_NM = tl.dot(high, b_HM, acc_NM, input_precision="ieee")
        else:
            part_NM = tl.dot(low, a_HM, input_precision="ieee")
            if whole:
                part_NM = tl.dot(high, b_HM, part_NM, input_precision="ieee")
            acc_NM += part_NM * scale_N[:, None]
            if SHIFTED:
                acc_NM += shift_N[:, None] * sum_M[None, :]
            if not whole:
                part_NM = tl.dot(high, b_HM, input_precision="ieee")
                acc_NM += part_NM * high_scale_N[:, None]
                if SHIFTED:
                    acc_NM += high_shift_N[:, None] * high_sum_M[None, :]
            scale_N = next_scale_N
    if GROUP == 0:
        acc_NM *= tl.load(scales_N, mask=live_N, other=0.0)[:, None]
    return acc_NM


@triton.jit(do_not_specialize=["rows"])
def _quantized_matmul(
    out_TO: tl.tensor,
    x_TI: tl.tensor,
    factors_T: tl.tensor,
    sums_TU: tl.tensor,
    codes_OB: tl.tensor,
    scales_GO: tl.tensor,
    shifts_GO: tl.tensor,
    table: tl.tensor,
    bias_O: tl.tensor,
    rows: tl.tensor,
    NUMBERS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """If STORED, `out_TO` is [S, T, O], and a program stores the sum of its split."""
    # Neighbouring programs read the same part of the weight.
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    output_N = tl.program_id(1) * N + tl.arange(0, N)
    # A weight or a step's output may have too many elements for 32-bit offsets.
    row_M, output_N = row_M.to(tl.int64), output_N.to(tl.int64)
    live_M, live_N = row_M < rows, output_N < ROWS
    first = tl.program_id(2) if STORED else 0
    last = first + 1 if STORED else SPLITS
    total_NM = tl.zeros([N, M], tl.float32)
    for split in range(first, last):
        acc_NM = split_sum(
            *(x_TI, sums_TU, codes_OB, scales_GO, shifts_GO, table),
            *(0, output_N, row_M, split * SPLIT, live_N, live_M),
            *(NUMBERS, INPUTS, ROWS, ROW_BYTES, GROUP, GROUPS, SHIFTED, SPLIT, N, M, H),
        )
        if SCALED:
            acc_NM *= tl.load(factors_T + row_M, mask=live_M, other=0.0)[None, :]
        total_NM += acc_NM
    if HAS_BIAS and not STORED:
        total_NM += tl.load(bias_O + output_N, mask=live_N, other=0.0)[:, None]
    if STORED:
        row_M += first * rows.to(tl.int64)
    out_NM = out_TO + row_M[None, :] * ROWS + output_N[:, None]
    live_NM = live_N[:, None] & live_M[None, :]
    tl.store(out_NM, total_NM.to(out_TO.dtype.element_ty), mask=live_NM)
