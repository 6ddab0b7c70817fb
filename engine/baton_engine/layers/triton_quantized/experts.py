"""The experts of a step with quantized weights on a GPU. Torch twin: `experts.experts_twin`.

Grids, pairs and the sum of a token's experts are those of `triton_experts`, products those of
`triton_quantized.products`. The tile has the same number of pairs in all steps, because no test at
the start compares others.

Shapes: T tokens, D hidden size, E experts, C experts of a token, F inner size of an expert,
G = 2 F, P = T C pairs. In a program: N outputs, M pairs, U experts in a power of 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from baton_engine.layers.experts import QuantizedExperts, Routes
from baton_engine.layers.triton_experts import (
    add_experts,
    expert_tile,
    gated,
    most_tiles,
    sorted_pairs,
)
from baton_engine.layers.triton_quantized.inputs import prepare
from baton_engine.layers.triton_quantized.products import split_sum, tensors_of
from baton_engine.layers.triton_quantized.weight import (
    TritonExperts,
    TritonWeight,
    triton_weight,
)


@dataclass(frozen=True, slots=True)
class Tile:
    pairs: int
    outputs: int
    stages: int
    warps: int = 4


TILE_32_BITS = Tile(pairs=16, outputs=32, stages=2)
TILE_16_BITS = Tile(pairs=32, outputs=64, stages=3)


def triton_experts(weights: QuantizedExperts) -> TritonExperts:
    clamped = weights.clamped
    return TritonExperts(
        triton_weight(weights.gate_up_EGD),
        triton_weight(weights.down_EDF),
        weights.gate_up_bias_EG,
        weights.down_bias_ED,
        None if clamped is None else (clamped.alpha, clamped.limit),
    )


def quantized_experts(x_TD: torch.Tensor, routes: Routes, weights: TritonExperts) -> torch.Tensor:
    """The sum [T, D] of the outputs of each token's experts, times their weights."""
    gate_up, down = weights.gate_up_EGD, weights.down_EDF
    count, size = len(down.codes_OB), gate_up.outputs // 2
    pairs, hidden, chosen = routes.ids_TC.numel(), down.outputs, routes.ids_TC.shape[1]
    tile = TILE_32_BITS if x_TD.dtype == torch.float32 else TILE_16_BITS
    order_P, begins_E = sorted_pairs(routes.ids_TC, count)
    inner_PF = torch.empty(pairs, size, dtype=x_TD.dtype, device=x_TD.device)
    out_PD = torch.empty(pairs, hidden, dtype=x_TD.dtype, device=x_TD.device)
    tiles = most_tiles(pairs, count, tile.pairs)
    _quantized_inner[(tiles, triton.cdiv(size, tile.outputs))](
        *(inner_PF, *tensors_of(gate_up, prepare(x_TD, gate_up.inputs), weights.gate_up_bias_EG)),
        *(order_P, begins_E, *(weights.clamp or (1.0, 1.0))),
        CHOSEN=chosen,
        HAS_BIAS=weights.gate_up_bias_EG is not None,
        CLAMPED=weights.clamp is not None,
        **_constants(gate_up, tile, count),
    )
    _quantized_outputs[(tiles, triton.cdiv(hidden, tile.outputs))](
        *(out_PD, *tensors_of(down, prepare(inner_PF, down.inputs), weights.down_bias_ED)),
        *(order_P, begins_E),
        HAS_BIAS=weights.down_bias_ED is not None,
        **_constants(down, tile, count),
    )
    return add_experts(out_PD, routes.weights_TC)


def _constants(weight: TritonWeight, tile: Tile, experts: int) -> dict[str, Any]:
    return {
        **weight.constants,
        "SPLIT": weight.steps * 2 * weight.half,
        "EXPERTS": experts,
        "U": triton.next_power_of_2(experts),
        "N": tile.outputs,
        "M": tile.pairs,
        "num_stages": tile.stages,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }


@triton.jit
def _quantized_inner(
    inner_PF: tl.tensor,
    x_TI: tl.tensor,
    factors_T: tl.tensor,
    sums_TU: tl.tensor,
    codes_EOB: tl.tensor,
    scales_EGO: tl.tensor,
    shifts_EGO: tl.tensor,
    table: tl.tensor,
    bias_EO: tl.tensor,
    order_P: tl.tensor,
    begins_E: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    NUMBERS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    U: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """The activation of gate and up, for a tile of the sorted pairs."""
    expert, first, end = expert_tile(begins_E, EXPERTS, U, M)
    if expert == EXPERTS:
        return
    expert = expert.to(tl.int64)
    pair_M = first + tl.arange(0, M)
    live_M = pair_M < end
    token_M = tl.load(order_P + pair_M, mask=live_M, other=0) // CHOSEN
    size: tl.constexpr = ROWS // 2
    gate_N = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    live_N, up_N = gate_N < size, gate_N + size
    gate_NM = split_sum(
        *(x_TI, sums_TU, codes_EOB, scales_EGO, shifts_EGO, table),
        *(expert, gate_N, token_M, 0, live_N, live_M),
        *(NUMBERS, INPUTS, ROWS, ROW_BYTES, GROUP, GROUPS, SHIFTED, SPLIT, N, M, H),
    )
    up_NM = split_sum(
        *(x_TI, sums_TU, codes_EOB, scales_EGO, shifts_EGO, table),
        *(expert, up_N, token_M, 0, live_N, live_M),
        *(NUMBERS, INPUTS, ROWS, ROW_BYTES, GROUP, GROUPS, SHIFTED, SPLIT, N, M, H),
    )
    if SCALED:
        factor_1M = tl.load(factors_T + token_M, mask=live_M, other=0.0)[None, :]
        gate_NM *= factor_1M
        up_NM *= factor_1M
    if HAS_BIAS:
        bias_N = bias_EO + expert * ROWS
        gate_NM += tl.load(bias_N + gate_N, mask=live_N, other=0.0)[:, None]
        up_NM += tl.load(bias_N + up_N, mask=live_N, other=0.0)[:, None]
    out_NM = gated(gate_NM, up_NM, inner_PF.dtype.element_ty, alpha, limit, CLAMPED)
    inner_NM = inner_PF + pair_M[None, :] * size + gate_N[:, None]
    tl.store(inner_NM, out_NM, mask=live_N[:, None] & live_M[None, :])


@triton.jit
def _quantized_outputs(
    out_PD: tl.tensor,
    x_TI: tl.tensor,
    factors_T: tl.tensor,
    sums_TU: tl.tensor,
    codes_EOB: tl.tensor,
    scales_EGO: tl.tensor,
    shifts_EGO: tl.tensor,
    table: tl.tensor,
    bias_EO: tl.tensor,
    order_P: tl.tensor,
    begins_E: tl.tensor,
    HAS_BIAS: tl.constexpr,
    NUMBERS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    EXPERTS: tl.constexpr,
    U: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    H: tl.constexpr,
) -> None:
    """The outputs of down for a tile of the sorted pairs, stored where the pairs were before."""
    expert, first, end = expert_tile(begins_E, EXPERTS, U, M)
    if expert == EXPERTS:
        return
    expert = expert.to(tl.int64)
    pair_M = (first + tl.arange(0, M)).to(tl.int64)
    live_M = pair_M < end
    place_M = tl.load(order_P + pair_M, mask=live_M, other=0)
    output_N = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    live_N = output_N < ROWS
    out_NM = split_sum(
        *(x_TI, sums_TU, codes_EOB, scales_EGO, shifts_EGO, table),
        *(expert, output_N, pair_M, 0, live_N, live_M),
        *(NUMBERS, INPUTS, ROWS, ROW_BYTES, GROUP, GROUPS, SHIFTED, SPLIT, N, M, H),
    )
    if SCALED:
        out_NM *= tl.load(factors_T + pair_M, mask=live_M, other=0.0)[None, :]
    if HAS_BIAS:
        out_NM += tl.load(bias_EO + expert * ROWS + output_N, mask=live_N, other=0.0)[:, None]
    place_NM = out_PD + place_M[None, :] * ROWS + output_N[:, None]
    live_NM = live_N[:, None] & live_M[None, :]
    tl.store(place_NM, out_NM.to(out_PD.dtype.element_ty), mask=live_NM)
