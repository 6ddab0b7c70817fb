"""Splits of the inner dimension of a product with a fixed tile, and the kernel that adds them.

A weight with few outputs has too few tiles to fill a device, so that each of several programs
computes one split of a tile. How many splits there are depends on the weight's shape, never on the
number of rows: with many rows, one program adds all splits of its tile, in the same order.

Shapes: T rows, O a product's output size, S splits. In a program: N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Tiles times splits of a weight, about two per multiprocessor, and the number of splits, at most.
SPLIT_PROGRAMS = 256
MOST_SPLITS = 16
# Steps of a split, at least. With no more than WHOLE_STEPS the second kernel takes as long as it
# saves.
SPLIT_STEPS, WHOLE_STEPS = 4, 16
# Rows whose splits are stored, at most: with 1,024 outputs, more have a tile per multiprocessor.
STORED_ROWS = 128
# Outputs that a program adds.
ADDED_OUTPUTS = 256


def split_steps(steps: int, tiles: int) -> int:
    """The number of steps in a split, if a tile of the outputs takes `steps` of them and there are
    `tiles` tiles."""
    splits = 1
    if steps > WHOLE_STEPS:
        splits = max(min(SPLIT_PROGRAMS // tiles, steps // SPLIT_STEPS, MOST_SPLITS), 1)
    return -(-steps // splits)


def add_splits(out_TO: torch.Tensor, sums_STO: torch.Tensor, bias_O: torch.Tensor | None) -> None:
    """Fill `out_TO` with the sums of the splits, plus the bias, rounded once."""
    splits, rows, outputs = sums_STO.shape
    _add_splits[(rows, triton.cdiv(outputs, ADDED_OUTPUTS))](
        *(out_TO, sums_STO, sums_STO if bias_O is None else bias_O, rows),
        OUTPUTS=outputs,
        SPLITS=splits,
        HAS_BIAS=bias_O is not None,
        N=ADDED_OUTPUTS,
        num_warps=2,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["rows"])
def _add_splits(
    out_TO: tl.tensor,
    sums_STO: tl.tensor,
    bias_O: tl.tensor,
    rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """In the order of a program that adds all splits of its tile."""
    row = tl.program_id(0).to(tl.int64)
    output_N = tl.program_id(1) * N + tl.arange(0, N)
    live_N = output_N < OUTPUTS
    total_N = tl.zeros([N], tl.float32)
    for split in tl.static_range(SPLITS):
        at_N = (split * rows + row) * OUTPUTS + output_N
        total_N += tl.load(sums_STO + at_N, mask=live_N, other=0.0)
    if HAS_BIAS:
        total_N += tl.load(bias_O + output_N, mask=live_N, other=0.0)
    out_N = out_TO + row * OUTPUTS + output_N
    tl.store(out_N, total_N.to(out_TO.dtype.element_ty), mask=live_N)
