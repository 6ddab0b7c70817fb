"""gpt-oss' model: each layer has experts with biases, which a router with a bias chooses.

The checkpoint has the experts of a layer in fused, transposed tensors, whose columns are those of
gate and up in turn. They are loaded into rows, first those of the gate.

Shapes: T tokens of the step, D hidden size, E experts, F inner size of an expert, G = 2 F.
"""

from __future__ import annotations

import torch

from baton_engine.config.experts import ExpertsConfig
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.decoder_layers import Linear
from baton_engine.layers.expert_routes import choose_experts
from baton_engine.layers.experts import ClampedSwiGLU, ExpertWeights
from baton_engine.layers.parameter import WeightSlots
from baton_engine.models.decoder import Decoder, DecoderLayer


class GptOssMoE:
    """The sum of the outputs of each token's experts, times their weights."""

    def __init__(
        self, slots: WeightSlots, name: str, config: ModelConfig, experts: ExpertsConfig
    ) -> None:
        self._config, self._ops = experts, slots.ops
        hidden = config.hidden_size
        self._router = Linear(
            slots, [f"{name}.router"], [experts.num_experts], hidden, experts.bias
        )
        self._weights = make_experts(slots, f"{name}.experts", hidden, experts)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        routes = choose_experts(self._router(x_TD).float(), self._config)
        return self._ops.experts(x_TD, routes, self._weights)


def make_experts(
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
    def make_mlp(self, slots: WeightSlots, name: str, layer: int, config: ModelConfig) -> GptOssMoE:
        assert config.experts is not None
        return GptOssMoE(slots, name, config, config.experts)


class GptOss(Decoder):
    layer_type = GptOssLayer
