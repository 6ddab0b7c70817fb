"""The experts of a step on a GPU. Torch twin: `experts.experts_twin`.

In: rows x, their routes and the weights of all experts. Out: the sum of the outputs of each token's
experts, times their weights.

The pairs of a token and one of its experts are sorted by expert, and each expert's pairs are in
tiles. How many tiles there are is known on the device only. So the grid has as many as there can be
at most, and programs without a tile end at once: a CUDA graph may record the launches. One kernel
computes the inner numbers of gate and up, the second one the outputs of down, and the third one
adds the outputs of a token's experts, in the order of its routes. The tile is fixed, so a token has
the same bits whatever tokens are beside it.

Shapes: T tokens, D hidden size, E experts, C experts of a token, F inner size of an expert,
G = 2 F, P = T C pairs. In a program: M pairs, N outputs, J inputs, U experts in a power of 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from baton_engine.layers.experts import ExpertWeights, Routes

# Outputs that a program of the third kernel adds.
ADDED_OUTPUTS = 512


@dataclass(frozen=True, slots=True)
class Tile:
    """`inputs` is a step's part of the inner dimension."""

    pairs: int
    outputs: int
    inputs: int
    stages: int
    warps: int = 4


# In float32 there are no tensor cores: rows that are missing from a tile take as long as others.
TILE_32_BITS = Tile(pairs=16, outputs=32, inputs=32, stages=2)
TILE_16_BITS = Tile(pairs=64, outputs=64, inputs=64, stages=3)


def experts(x_TD: torch.Tensor, routes: Routes, weights: ExpertWeights) -> torch.Tensor:
    """The sum [T, D]. Weights and biases must be contiguous."""
    tokens, hidden = x_TD.shape
    chosen = routes.ids_TC.shape[1]
    count, _, size = weights.down_EDF.shape
    pairs, device = tokens * chosen, x_TD.device
    tile = TILE_32_BITS if x_TD.dtype == torch.float32 else TILE_16_BITS
    order_P, begins_E = sorted_pairs(routes.ids_TC, count)
    inner_PF = torch.empty(pairs, size, dtype=x_TD.dtype, device=device)
    out_PD = torch.empty(pairs, hidden, dtype=x_TD.dtype, device=device)
    clamped = weights.clamped
    most = most_tiles(pairs, count, tile.pairs)
    constants = {
        "EXPERTS": count,
        "U": triton.next_power_of_2(count),
        "M": tile.pairs,
        "N": tile.outputs,
        "J": tile.inputs,
        "num_stages": tile.stages,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }
    _expert_inner[(most, triton.cdiv(size, tile.outputs))](
        *(inner_PF, x_TD.contiguous(), weights.gate_up_EGD),
        *(_or(weights.gate_up_bias_EG, x_TD), order_P, begins_E),
        *((1.0, 1.0) if clamped is None else (clamped.alpha, clamped.limit)),
        INPUTS=hidden,
        OUTPUTS=size,
        CHOSEN=chosen,
        HAS_BIAS=weights.gate_up_bias_EG is not None,
        CLAMPED=clamped is not None,
        **constants,
    )
    _expert_outputs[(most, triton.cdiv(hidden, tile.outputs))](
        *(out_PD, inner_PF, weights.down_EDF),
        *(_or(weights.down_bias_ED, x_TD), order_P, begins_E),
        INPUTS=size,
        OUTPUTS=hidden,
        HAS_BIAS=weights.down_bias_ED is not None,
        **constants,
    )
    return add_experts(out_PD, routes.weights_TC)


def sorted_pairs(ids_TC: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs in the order of their experts [P], and where each expert's begin there [E + 1]."""
    sorted_P, order_P = ids_TC.reshape(-1).sort(stable=True)
    expert_E = torch.arange(experts + 1, device=ids_TC.device)
    return order_P, torch.searchsorted(sorted_P, expert_E, out_int32=True)


def add_experts(out_PD: torch.Tensor, weights_TC: torch.Tensor) -> torch.Tensor:
    """The sum [T, D] of the outputs of each token's experts, times their weights."""
    (tokens, chosen), hidden = weights_TC.shape, out_PD.shape[1]
    out_TD = torch.empty(tokens, hidden, dtype=out_PD.dtype, device=out_PD.device)
    _add_experts[(tokens, triton.cdiv(hidden, ADDED_OUTPUTS))](
        *(out_TD, out_PD, weights_TC.contiguous()),
        OUTPUTS=hidden,
        CHOSEN=chosen,
        N=ADDED_OUTPUTS,
        num_warps=2,
        enable_fp_fusion=False,
    )
    return out_TD


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """How many tiles of the pairs of one expert there can be."""
    used = min(pairs, experts)
    return used + (pairs - used) // tile


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if tensor is None else tensor


@triton.jit
def expert_tile(
    begins_E: tl.tensor, EXPERTS: tl.constexpr, U: tl.constexpr, M: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The expert of this program's tile, and the tile's first pair and the end of the expert's.
    The expert is EXPERTS if there is no tile."""
    expert_U = tl.arange(0, U)
    live_U = expert_U < EXPERTS
    begin_U = tl.load(begins_E + expert_U, mask=live_U, other=0)
    end_U = tl.load(begins_E + expert_U + 1, mask=live_U, other=0)
    tiles_U = (end_U - begin_U + M - 1) // M
    until_U = tl.cumsum(tiles_U, 0)
    tile = tl.program_id(0)
    # Places from EXPERTS on have as many tiles before them as there are.
    expert = tl.sum(((until_U <= tile) & live_U).to(tl.int32), 0)
    first_U = begin_U + (tile - until_U + tiles_U) * M
    first = tl.sum(tl.where(expert_U == expert, first_U, 0), 0)
    end = tl.sum(tl.where(expert_U == expert, end_U, 0), 0)
    return expert, first, end


@triton.jit
def gated(
    gate: tl.tensor,
    up: tl.tensor,
    DTYPE: tl.constexpr,
    alpha: tl.tensor,
    limit: tl.tensor,
    CLAMPED: tl.constexpr,
) -> tl.tensor:
    """The inner numbers in DTYPE, from float32 outputs of gate and up."""
    # As if both were stored and read again.
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    scaled = gate
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        scaled = gate * alpha
    # exp of a number <= 0 cannot overflow.
    shrunk = tl.exp(-tl.abs(scaled))
    sigmoid = tl.where(scaled >= 0, 1.0, shrunk) / (1.0 + shrunk)
    return (gate * sigmoid * up).to(DTYPE)


@triton.jit
def _expert_inner(
    inner_PF: tl.tensor,
    x_TD: tl.tensor,
    weight_EGD: tl.tensor,
    bias_EG: tl.tensor,
    order_P: tl.tensor,
    begins_E: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    EXPERTS: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    J: tl.constexpr,
) -> None:
    """The activation of gate and up, for a tile of the sorted pairs."""
    expert, first, end = expert_tile(begins_E, EXPERTS, U, M)
    if expert == EXPERTS:
        return
    pair_M = first + tl.arange(0, M)
    live_M = pair_M < end
    token_M = tl.load(order_P + pair_M, mask=live_M, other=0) // CHOSEN
    output_N = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    live_N = output_N < OUTPUTS
    input_J = tl.arange(0, J)
    x_MJ = x_TD + token_M[:, None] * INPUTS + input_J[None, :]
    gate_N = expert.to(tl.int64) * 2 * OUTPUTS + output_N
    gate_JN = weight_EGD + gate_N[None, :] * INPUTS + input_J[:, None]
    up_JN = gate_JN + OUTPUTS * INPUTS
    gate_MN, up_MN = tl.zeros([M, N], tl.float32), tl.zeros([M, N], tl.float32)
    for begin in range(0, INPUTS, J):
        inside_J = begin + input_J < INPUTS
        a_MJ = tl.load(x_MJ + begin, mask=live_M[:, None] & inside_J[None, :], other=0.0)
        live_JN = live_N[None, :] & inside_J[:, None]
        b_JN = tl.load(gate_JN + begin, mask=live_JN, other=0.0)
        gate_MN = tl.dot(a_MJ, b_JN, gate_MN, input_precision="ieee")
        b_JN = tl.load(up_JN + begin, mask=live_JN, other=0.0)
        up_MN = tl.dot(a_MJ, b_JN, up_MN, input_precision="ieee")
    if HAS_BIAS:
        gate_MN += tl.load(bias_EG + gate_N, mask=live_N, other=0.0)[None, :]
        up_MN += tl.load(bias_EG + OUTPUTS + gate_N, mask=live_N, other=0.0)[None, :]
    out_MN = gated(gate_MN, up_MN, inner_PF.dtype.element_ty, alpha, limit, CLAMPED)
    inner_MN = inner_PF + pair_M[:, None] * OUTPUTS + output_N[None, :]
    live_MN = live_M[:, None] & live_N[None, :]
    tl.store(inner_MN, out_MN, mask=live_MN)


@triton.jit
def _expert_outputs(
    out_PD: tl.tensor,
    inner_PF: tl.tensor,
    weight_EDF: tl.tensor,
    bias_ED: tl.tensor,
    order_P: tl.tensor,
    begins_E: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    U: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    J: tl.constexpr,
) -> None:
    """The outputs of down for a tile of the sorted pairs, stored where the pairs were before."""
    expert, first, end = expert_tile(begins_E, EXPERTS, U, M)
    if expert == EXPERTS:
        return
    pair_M = first + tl.arange(0, M)
    live_M = pair_M < end
    place_M = tl.load(order_P + pair_M, mask=live_M, other=0)
    output_N = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    live_N = output_N < OUTPUTS
    input_J = tl.arange(0, J)
    inner_MJ = inner_PF + pair_M[:, None] * INPUTS + input_J[None, :]
    row_N = expert.to(tl.int64) * OUTPUTS + output_N
    weight_JN = weight_EDF + row_N[None, :] * INPUTS + input_J[:, None]
    out_MN = tl.zeros([M, N], tl.float32)
    for begin in range(0, INPUTS, J):
        inside_J = begin + input_J < INPUTS
        a_MJ = tl.load(inner_MJ + begin, mask=live_M[:, None] & inside_J[None, :], other=0.0)
        b_JN = tl.load(weight_JN + begin, mask=live_N[None, :] & inside_J[:, None], other=0.0)
        out_MN = tl.dot(a_MJ, b_JN, out_MN, input_precision="ieee")
    if HAS_BIAS:
        out_MN += tl.load(bias_ED + row_N, mask=live_N, other=0.0)[None, :]
    place_MN = out_PD + place_M[:, None] * OUTPUTS + output_N[None, :]
    live_MN = live_M[:, None] & live_N[None, :]
    tl.store(place_MN, out_MN.to(out_PD.dtype.element_ty), mask=live_MN)


@triton.jit
def _add_experts(
    out_TD: tl.tensor,
    out_PD: tl.tensor,
    factor_P: tl.tensor,
    OUTPUTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
) -> None:
    """The weighted sum of a token's experts, in float32 and in the order of its routes."""
    token = tl.program_id(0).to(tl.int64)
    output_N = tl.program_id(1) * N + tl.arange(0, N)
    live_N = output_N < OUTPUTS
    total_N = tl.zeros([N], tl.float32)
    for choice in tl.static_range(CHOSEN):
        pair = token * CHOSEN + choice
        part_N = tl.load(out_PD + pair * OUTPUTS + output_N, mask=live_N, other=0.0)
        total_N += part_N.to(tl.float32) * tl.load(factor_P + pair)
    out_N = out_TD + token * OUTPUTS + output_N
    tl.store(out_N, total_N.to(out_TD.dtype.element_ty), mask=live_N)
