"""`Ops` with Triton kernels: one launch where `TorchOps` needs several.

Inputs, outputs and shapes: see `ops`.
"""

from __future__ import annotations

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.layers import triton_activation, triton_norm, triton_rope_store, triton_sampled
from baton_engine.layers.experts import (
    Experts,
    ExpertWeights,
    LoadedExperts,
    QuantizedExperts,
    Routes,
)
from baton_engine.layers.rotary import HeadNorm, RopeTables
from baton_engine.layers.triton_experts import experts
from baton_engine.layers.triton_quantized.experts import quantized_experts, triton_experts
from baton_engine.layers.triton_quantized.weight import TritonExperts
from baton_engine.sampling.triton_sampler import choose_tokens


class TritonOps:
    add_norm = staticmethod(triton_norm.add_norm)
    draw = staticmethod(choose_tokens)
    put_sampled = staticmethod(triton_sampled.put_sampled)

    def pack_experts(self, weights: LoadedExperts) -> Experts:
        return triton_experts(weights) if isinstance(weights, QuantizedExperts) else weights

    def experts(self, x_TD: torch.Tensor, routes: Routes, weights: Experts) -> torch.Tensor:
        if isinstance(weights, TritonExperts):
            return quantized_experts(x_TD, routes, weights)
        assert isinstance(weights, ExpertWeights), "not from pack_experts()"
        return experts(x_TD, routes, weights)

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        return triton_activation.activation_mul(gate_up_TF, "silu")

    def gelu_tanh_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        return triton_activation.activation_mul(gate_up_TF, "gelu_tanh")

    def attend(
        self,
        heads_TZH: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rope: RopeTables,
        layer: int,
        attention: StepAttention,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        triton_rope_store.rotate_store(heads_TZH, num_heads, norm, rope, attention.slots(layer))
        both = (num_heads + heads_TZH.shape[1]) // 2  # N + K
        q_TNH, k_TKH = heads_TZH[:, :num_heads], heads_TZH[:, num_heads:both]
        v_TKH = heads_TZH[:, both:]
        return attention.attend(layer, q_TNH, k_TKH, v_TKH, stored=True, sinks_N=sinks_N)
