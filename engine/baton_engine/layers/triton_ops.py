"""`Ops` with Triton kernels: one launch where `TorchOps` needs several.

Inputs, outputs and shapes: see `ops`.
"""

from __future__ import annotations

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.layers.rotary import HeadNorm, RopeTables
from baton_engine.layers.triton_activation import activation_mul
from baton_engine.layers.triton_norm import add_norm
from baton_engine.layers.triton_rope_store import rotate_store
from baton_engine.layers.triton_sampled import put_sampled
from baton_engine.sampling.metadata import Draws
from baton_engine.sampling.triton_sampler import choose_tokens


class TritonOps:
    def add_norm(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        weight_D: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        return add_norm(x_TD, delta_TD, weight_D, eps)

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        return activation_mul(gate_up_TF, "silu")

    def gelu_tanh_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        return activation_mul(gate_up_TF, "gelu_tanh")

    def attend(
        self,
        heads_TZH: torch.Tensor,
        num_heads: int,
        norm: HeadNorm | None,
        rope: RopeTables,
        layer: int,
        attention: StepAttention,
    ) -> torch.Tensor:
        rotate_store(heads_TZH, num_heads, norm, rope, attention.slots(layer))
        both = (num_heads + heads_TZH.shape[1]) // 2  # N + K
        q_TNH, k_TKH = heads_TZH[:, :num_heads], heads_TZH[:, num_heads:both]
        return attention.attend(layer, q_TNH, k_TKH, heads_TZH[:, both:], stored=True)

    def draw(self, logits_SV: torch.Tensor, draws: Draws) -> torch.Tensor:
        return choose_tokens(logits_SV, draws)

    def put_sampled(
        self, tokens_T: torch.Tensor, awaits_T: torch.Tensor, ids_S: torch.Tensor
    ) -> None:
        put_sampled(tokens_T, awaits_T, ids_S)
