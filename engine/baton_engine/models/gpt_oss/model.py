"""gpt-oss' model: each layer has experts with biases, which a router with a bias chooses.

The checkpoint has the experts of a layer in fused, transposed tensors, whose columns are those of
gate and up in turn. They are loaded into rows, first those of the gate. Experts in MXFP4 are in
rows already, which are those of gate and up in turn.

Shapes: D hidden size, E experts, F inner size of an expert, G = 2 F.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.quantization.mxfp4 import LAYOUT
from baton_engine.layers.experts import ClampedSwiGLU, ExpertWeights, QuantizedExperts
from baton_engine.layers.moe import MoE
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.mxfp4 import declare_experts
from baton_engine.models.decoder import Decoder, DecoderLayer


class GptOssMoE(MoE):
    router_name = "router"

    def _declare_experts(
        self, slots: WeightSlots, name: str, here: str, hidden: int, experts: ExpertsConfig
    ) -> None:
        scheme = slots.scheme_of(f"{here}.experts")
        if scheme is None or scheme.layout != LAYOUT:
            super()._declare_experts(slots, name, here, hidden, experts)
            return
        quantized = mxfp4_experts(slots, f"{here}.experts", hidden, experts)
        slots.when_filled(lambda: self._pack(quantized()))

    def make_experts(
        self, slots: WeightSlots, name: str, here: str, hidden: int, experts: ExpertsConfig
    ) -> ExpertWeights:
        return fused_experts(slots, f"{here}.experts", hidden, experts)


def fused_experts(
    slots: WeightSlots, name: str, hidden: int, experts: ExpertsConfig
) -> ExpertWeights:
    """Weights that the tensors `gate_up_proj` [E, D, G] and `down_proj` [E, F, D] of a checkpoint
    fill, and their biases."""
    count, size = experts.num_experts, experts.size
    gate_up_EGD, down_EDF = slots.empty(count, 2 * size, hidden), slots.empty(count, hidden, size)
    columns_EDF2 = gate_up_EGD.view(count, 2, size, hidden).permute(0, 3, 2, 1)
    slots.fill(f"{name}.gate_up_proj", columns_EDF2, (count, hidden, 2 * size))
    slots.fill(f"{name}.down_proj", down_EDF.transpose(1, 2))
    biases = _biases(slots, name, hidden, experts)
    return ExpertWeights(gate_up_EGD, down_EDF, *biases, _clamped(experts))


def mxfp4_experts(
    slots: WeightSlots, name: str, hidden: int, experts: ExpertsConfig
) -> Callable[[], QuantizedExperts]:
    """Experts whose weights are in MXFP4."""
    count, size = experts.num_experts, experts.size
    gate_up = declare_experts(slots, f"{name}.gate_up_proj", count, 2 * size, hidden, in_turn=2)
    down = declare_experts(slots, f"{name}.down_proj", count, hidden, size)
    biases = _biases(slots, name, hidden, experts)
    return lambda: QuantizedExperts(gate_up(), down(), *biases, _clamped(experts))


def _biases(
    slots: WeightSlots, name: str, hidden: int, experts: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    count, size = experts.num_experts, experts.size
    gate_up_bias_EG, down_bias_ED = slots.empty(count, 2 * size), slots.empty(count, hidden)
    bias_EF2 = gate_up_bias_EG.view(count, 2, size).transpose(1, 2)
    slots.fill(f"{name}.gate_up_proj_bias", bias_EF2, (count, 2 * size))
    slots.fill(f"{name}.down_proj_bias", down_bias_ED)
    return gate_up_bias_EG, down_bias_ED


def _clamped(experts: ExpertsConfig) -> ClampedSwiGLU:
    assert experts.swiglu_limit is not None
    return ClampedSwiGLU(experts.swiglu_alpha, experts.swiglu_limit)


class GptOssLayer(DecoderLayer):
    moe_type = GptOssMoE


class GptOss(Decoder):
    layer_type = GptOssLayer
