"""Products of linear layers with a fixed tile: a row has the same bits whatever rows are beside it.

In: x and a weight in float32 or bfloat16. Out: x @ weight^T + bias, rounded once from float32. A
program computes one tile of the output. It adds the whole inner dimension in ascending order; there
is no split-K. The tile depends on the weight's shape and dtype, never on the number of rows: the
last rows of a tile may be missing. Torch twin: `linear_method.plain_product`.

Libraries choose tiles, split-K and instructions by the number of rows, so that a decode step and a
prompt get different bits.

Shapes: T rows, O and I a linear's output and input size. In a program: M rows, N outputs, J inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_engine.attention.exact.row_rule import Product
from baton_engine.layers.linear_method import HEAD, LinearMethod

# Tiles are narrow if a weight has fewer of them than this, about the number of multiprocessors.
LEAST_TILES = 128
WIDTHS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Tile:
    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int


def tile_of(outputs: int, item_bytes: int) -> Tile:
    """The tile for a weight with this number of outputs."""
    if item_bytes == 4:  # no tensor cores: larger tiles overflow into memory
        return Tile(rows=64, outputs=64, inputs=32, stages=2, warps=4)
    width = next((each for each in WIDTHS if outputs >= LEAST_TILES * each), WIDTHS[-1])
    return Tile(rows=64, outputs=width, inputs=64, stages=4, warps=4)


def fixed_tile_product(
    weight_OI: torch.Tensor, bias_O: torch.Tensor | None, dtype: torch.dtype | None = None
) -> Product:
    """The product, with results in `dtype` (default: the weight's). The weight must be
    contiguous."""
    outputs, inputs = weight_OI.shape
    tile = tile_of(outputs, weight_OI.element_size())

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        rows = len(x_TI)
        out_TO = torch.empty(rows, outputs, dtype=dtype or weight_OI.dtype, device=x_TI.device)
        # Neighbouring programs read the same part of the weight.
        _matmul[(triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.outputs))](
            *(out_TO, x_TI.contiguous(), weight_OI, weight_OI if bias_O is None else bias_O, rows),
            OUTPUTS=outputs,
            INPUTS=inputs,
            HAS_BIAS=bias_O is not None,
            M=tile.rows,
            N=tile.outputs,
            J=tile.inputs,
            num_stages=tile.stages,
            num_warps=tile.warps,
        )
        return out_TO

    return product


COUNTS = (1, 16, 64, 100)
FIXED_TILE = LinearMethod(fixed_tile_product, any_rows=True, counts=COUNTS)
FIXED_TILE_HEAD = LinearMethod(
    lambda weight_VD, bias_V: fixed_tile_product(weight_VD, bias_V, torch.float32),
    any_rows=True,
    counts=COUNTS,
)


def fixed_tile_methods(name: str) -> LinearMethod:
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
    HAS_BIAS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    J: tl.constexpr,
) -> None:
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    output_N = tl.program_id(1) * N + tl.arange(0, N)
    input_J = tl.arange(0, J)
    # A weight or a step's output may have too many elements for 32-bit offsets.
    row_M, output_N = row_M.to(tl.int64), output_N.to(tl.int64)
    x_MJ = x_TI + row_M[:, None] * INPUTS + input_J[None, :]
    weight_JN = weight_OI + output_N[None, :] * INPUTS + input_J[:, None]
    live_M1, live_1N = (row_M < rows)[:, None], (output_N < OUTPUTS)[None, :]
    acc_MN = tl.zeros([M, N], tl.float32)
    for begin in range(0, INPUTS, J):
        if INPUTS % J == 0:
            a_MJ = tl.load(x_MJ + begin, mask=live_M1, other=0.0)
            b_JN = tl.load(weight_JN + begin, mask=live_1N, other=0.0)
        else:
            inside_J = begin + input_J < INPUTS
            a_MJ = tl.load(x_MJ + begin, mask=live_M1 & inside_J[None, :], other=0.0)
            b_JN = tl.load(weight_JN + begin, mask=live_1N & inside_J[:, None], other=0.0)
        acc_MN = tl.dot(a_MJ, b_JN, acc_MN, input_precision="ieee")
    if HAS_BIAS:
        acc_MN += tl.load(bias_O + output_N, mask=output_N < OUTPUTS, other=0.0)[None, :]
    out_MN = out_TO + row_M[:, None] * OUTPUTS + output_N[None, :]
    tl.store(out_MN, acc_MN.to(out_TO.dtype.element_ty), mask=live_M1 & live_1N)
