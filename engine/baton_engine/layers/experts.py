"""Products of a mixture of experts: the weights, and the naive computation of the outputs, which is
the twin of the kernels.

Shapes: T tokens of the step, D hidden size, E experts, C experts chosen by a token, F inner size of
an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from baton_engine.cpu_kernels.experts import PackedExperts, can_pack, pack_experts
from baton_engine.layers.quantization.cpu_experts import (
    QuantizedCPUExperts,
    pack_quantized_experts,
)
from baton_engine.layers.quantization.quantized_weight import (
    QuantizedWeight,
    Weight,
    quantized_twin,
)
from baton_engine.layers.triton_quantized.weight import TritonExperts


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gpt-oss' gate: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up
    between -`limit` and `limit`."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of all experts of a layer. The first F outputs of `gate_up_EGD`, with G = 2 F,
    are the gate's. Without `clamped`, an expert is down(silu(gate(x)) * up(x))."""

    gate_up_EGD: torch.Tensor
    down_EDF: torch.Tensor
    gate_up_bias_EG: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    clamped: ClampedSwiGLU | None = None


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """As ExpertWeights, with quantized weights."""

    gate_up_EGD: QuantizedWeight
    down_EDF: QuantizedWeight
    gate_up_bias_EG: torch.Tensor | None = None
    down_bias_ED: torch.Tensor | None = None
    clamped: ClampedSwiGLU | None = None


# The experts of a layer as they are loaded, and in the form that its Ops read.
LoadedExperts = ExpertWeights | QuantizedExperts
Experts = LoadedExperts | PackedExperts | QuantizedCPUExperts | TritonExperts


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of each token, in ascending order of their ids, and their weights."""

    ids_TC: torch.Tensor  # int64
    weights_TC: torch.Tensor  # float32


def experts_twin(x_TD: torch.Tensor, routes: Routes, weights: LoadedExperts) -> torch.Tensor:
    """The sum [T, D] of the outputs of each token's experts, times their weights.

    The products are in x's dtype; the sum is in float32, in the order of the routes, and rounded
    once. A token's bits may not depend on other tokens: kernels add in a fixed order, too.
    """
    sums_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for expert in range(weights.down_EDF.shape[0]):
        tokens, places = torch.where(routes.ids_TC == expert)
        out_SD = _one_expert(x_TD[tokens], weights, expert).float()
        sums_TD[tokens] += out_SD * routes.weights_TC[tokens, places, None]
    return sums_TD.to(x_TD.dtype)


def gated(gate_up_SG: torch.Tensor, clamped: ClampedSwiGLU | None) -> torch.Tensor:
    """An expert's inner numbers [S, F] from those of gate and up, rounded once."""
    gate_SF, up_SF = gate_up_SG.float().chunk(2, dim=-1)
    if clamped is None:
        return (F.silu(gate_SF) * up_SF).to(gate_up_SG.dtype)
    gate_SF = gate_SF.clamp(max=clamped.limit)
    up_SF = up_SF.clamp(-clamped.limit, clamped.limit)
    inner_SF = (up_SF + 1) * (gate_SF * torch.sigmoid(gate_SF * clamped.alpha))
    return inner_SF.to(gate_up_SG.dtype)


def packed_experts(weights: LoadedExperts) -> Experts:
    """The weights for `cpu_kernels.experts`, on a CPU and in a dtype that it computes; else as they
    are. Packs them in place where their sizes allow it."""
    clamped = weights.clamped
    clamp = None if clamped is None else (clamped.alpha, clamped.limit)
    biases = weights.gate_up_bias_EG, weights.down_bias_ED
    if isinstance(weights, QuantizedExperts):
        packed = pack_quantized_experts(weights.gate_up_EGD, weights.down_EDF, *biases, clamp)
        return weights if packed is None else packed
    if not can_pack(weights.down_EDF):
        return weights
    return pack_experts(weights.gate_up_EGD, weights.down_EDF, *biases, clamp)


def _one_expert(x_SD: torch.Tensor, weights: LoadedExperts, expert: int) -> torch.Tensor:
    gate_up_bias, down_bias = weights.gate_up_bias_EG, weights.down_bias_ED
    gate_up_SG = _multiplied(x_SD, weights.gate_up_EGD, expert, gate_up_bias)
    return _multiplied(gated(gate_up_SG, weights.clamped), weights.down_EDF, expert, down_bias)


def _multiplied(
    x_SI: torch.Tensor, weight_EOI: Weight, expert: int, bias_EO: torch.Tensor | None
) -> torch.Tensor:
    bias_O = None if bias_EO is None else bias_EO[expert]
    if isinstance(weight_EOI, QuantizedWeight):
        return quantized_twin(weight_EOI.one(expert), bias_O)(x_SI)
    return F.linear(x_SI, weight_EOI[expert], bias_O)
