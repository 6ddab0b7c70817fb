"""Products of linear layers with a fixed tile: a row has the same bits whatever rows are beside it.

In: x and a weight in float32 or bfloat16. Out: x @ weight^T + bias, rounded once from float32. A
program computes one tile of the output. The inner dimension is in splits. Each split is reduced
from 0 in ascending order, and the splits are added in ascending order. Tile and splits depend on
the weight's shape and dtype, never on the number of rows: the last rows of a tile may be missing.
Torch twin: `linear_method.plain_product`.

A weight with few outputs has too few tiles to fill a device. For few rows, a program therefore
computes one split, and a second kernel adds them. For many rows, one program adds all splits of its
tile. Both give the same bits: they add the same float32 sums in the same order. Without splits, a
product of 1,024 outputs and 3,072 inputs is 32 programs of 48 steps, one after the other; with them
it is 256 programs of 6.

Libraries choose tiles, splits and instructions by the number of rows, so that a decode step and a
prompt get different bits.

Shapes: T rows, O and I a linear's output and input size, S splits. In a program: M rows, N outputs,
J inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_engine.attention.exact.row_rule import Product
from baton_engine.layers.linear_method import HEAD, LinearMethod, packed_methods
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, Weight
from baton_engine.layers.triton_quantized.products import quantized_tile_method
from baton_engine.layers.triton_splits import STORED_ROWS, add_splits, split_steps

# Tiles are narrow if a weight has fewer of them than this, about the number of multiprocessors.
LEAST_TILES = 128
WIDTHS = (128, 64, 32)
# Numbers of rows that a test compares; the last one adds its splits in one program.
COUNTS = (1, 16, 64, 100, STORED_ROWS + 1)


@dataclass(frozen=True, slots=True)
class Tile:
    """`inputs` is a step's part of the inner dimension, `split` that of a split."""

    rows: int
    outputs: int
    inputs: int
    split: int
    stages: int
    warps: int

    def splits(self, inputs: int) -> int:
        return -(-inputs // self.split)


def tile_of(outputs: int, inputs: int, item_bytes: int) -> Tile:
    """The tile for a weight with this number of outputs and inputs."""
    width = next(
        (candidate for candidate in WIDTHS if outputs >= LEAST_TILES * candidate), WIDTHS[-1]
    )
    step, stages = 64, 4
    if item_bytes == 4:  # no tensor cores: larger tiles overflow into memory
        width, step, stages = 64, 32, 2
    split = split_steps(triton.cdiv(inputs, step), triton.cdiv(outputs, width)) * step
    return Tile(rows=64, outputs=width, inputs=step, split=split, stages=stages, warps=4)


def fixed_tile_product(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype | None = None
) -> Product:
    """The product, with results in `dtype` (default: the weight's). The weight must be
    contiguous."""
    outputs, inputs = weight_OI.shape
    tile = tile_of(outputs, inputs, weight_OI.element_size())
    splits = tile.splits(inputs)
    bias = weight_OI if bias_O is None else bias_O

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        rows, device = len(x_TI), x_TI.device
        out_TO = torch.empty(rows, outputs, dtype=dtype or weight_OI.dtype, device=device)
        stored = splits > 1 and rows <= STORED_ROWS
        sums = out_TO
        if stored:
            sums = torch.empty(splits, rows, outputs, dtype=torch.float32, device=device)
        # Neighbouring programs read the same part of the weight.
        grid = (triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))
        _matmul[(*grid, splits if stored else 1)](
            *(sums, x_TI.contiguous(), weight_OI, bias, rows),
            OUTPUTS=outputs,
            INPUTS=inputs,
            SPLIT=tile.split,
            SPLITS=splits,
            STORED=stored,
            HAS_BIAS=bias_O is not None,
            M=tile.rows,
            N=tile.outputs,
            J=tile.inputs,
            num_stages=tile.stages,
            num_warps=tile.warps,
            enable_fp_fusion=False,
        )
        if stored:
            add_splits(out_TO, sums, bias_O)
        return out_TO

    return product


FIXED_TILE = LinearMethod(fixed_tile_product, any_rows=True, counts=COUNTS)
FIXED_TILE_HEAD = LinearMethod(
    lambda weight_VD, bias_V: fixed_tile_product(weight_VD, bias_V, torch.float32),
    any_rows=True,
    counts=COUNTS,
)


def quantized_tile_methods(name: str, weight: Weight) -> LinearMethod:
    """A fixed tile only for quantized weights."""
    if isinstance(weight, QuantizedWeight):
        return quantized_tile_method(name)
    return packed_methods(name, weight)


def fixed_tile_methods(name: str, weight: Weight) -> LinearMethod:
    if isinstance(weight, QuantizedWeight):
        return quantized_tile_method(name)
    return FIXED_TILE_HEAD if name == HEAD else FIXED_TILE


@triton.jit(do_not_specialize=["rows"])
def _matmul(
    out_TO: tl.tensor,
    x_TI: tl.tensor,
    weight_OI: tl.tensor,
    bias_O: tl.tensor,
    rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLITS: tl.constexpr,
    STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    J: tl.constexpr,
) -> None:
    """If STORED, `out_TO` is [S, T, O], and a program stores the sum of its split."""
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    output_N = tl.program_id(1) * N + tl.arange(0, N)
    input_J = tl.arange(0, J)
    # A weight or a step's output may have too many elements for 32-bit offsets.
    row_M, output_N = row_M.to(tl.int64), output_N.to(tl.int64)
    x_MJ = x_TI + row_M[:, None] * INPUTS + input_J[None, :]
    weight_JN = weight_OI + output_N[None, :] * INPUTS + input_J[:, None]
    live_M1, live_1N = (row_M < rows)[:, None], (output_N < OUTPUTS)[None, :]
    first = tl.program_id(2) if STORED else 0
    last = first + 1 if STORED else SPLITS
    total_MN = tl.zeros([M, N], tl.float32)
    for split in range(first, last):
        acc_MN = tl.zeros([M, N], tl.float32)
        for step in range(0, SPLIT, J):
            begin = split * SPLIT + step
            if INPUTS % SPLIT == 0:
                a_MJ = tl.load(x_MJ + begin, mask=live_M1, other=0.0)
                b_JN = tl.load(weight_JN + begin, mask=live_1N, other=0.0)
            else:
                inside_J = begin + input_J < INPUTS
                a_MJ = tl.load(x_MJ + begin, mask=live_M1 & inside_J[None, :], other=0.0)
                b_JN = tl.load(weight_JN + begin, mask=live_1N & inside_J[:, None], other=0.0)
            acc_MN = tl.dot(a_MJ, b_JN, acc_MN, input_precision="ieee")
        total_MN += acc_MN
    if HAS_BIAS and not STORED:
        total_MN += tl.load(bias_O + output_N, mask=output_N < OUTPUTS, other=0.0)[None, :]
    if STORED:
        row_M += first * rows.to(tl.int64)
    out_MN = out_TO + row_M[:, None] * OUTPUTS + output_N[None, :]
    tl.store(out_MN, total_MN.to(out_TO.dtype.element_ty), mask=live_M1 & live_1N)
