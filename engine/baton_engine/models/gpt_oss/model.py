"""gpt-oss' model: each layer has experts with biases, which a router with a bias chooses.

The checkpoint has the experts of a layer in fused, transposed tensors, whose columns are those of
gate and up in turn. They are loaded into rows, first those of the gate.

Shapes: D hidden size, E experts, F inner size of an expert, G = 2 F.
"""

from __future__ import annotations

from baton_engine.config.experts import ExpertsConfig
from baton_engine.layers.experts import ClampedSwiGLU, ExpertWeights
from baton_engine.layers.moe import MoE
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder, DecoderLayer


class GptOssMoE(MoE):
    router_name = "router"

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
    gate_up_bias_EG, down_bias_ED = slots.empty(count, 2 * size), slots.empty(count, hidden)
    columns_EDF2 = gate_up_EGD.view(count, 2, size, hidden).permute(0, 3, 2, 1)
    bias_EF2 = gate_up_bias_EG.view(count, 2, size).transpose(1, 2)
    slots.fill(f"{name}.gate_up_proj", columns_EDF2, (count, hidden, 2 * size))
    slots.fill(f"{name}.gate_up_proj_bias", bias_EF2, (count, 2 * size))
    slots.fill(f"{name}.down_proj", down_EDF.transpose(1, 2))
    slots.fill(f"{name}.down_proj_bias", down_bias_ED)
    assert experts.swiglu_limit is not None
    clamped = ClampedSwiGLU(experts.swiglu_alpha, experts.swiglu_limit)
    return ExpertWeights(gate_up_EGD, down_EDF, gate_up_bias_EG, down_bias_ED, clamped)


class GptOssLayer(DecoderLayer):
    moe_type = GptOssMoE


class GptOss(Decoder):
    layer_type = GptOssLayer
