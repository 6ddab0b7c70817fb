"""The small operations of models and the sampler: the Ops Protocol and its torch implementation.

torch needs several passes over a step's activations where a kernel needs one. Models call `Ops` and
do not depend on the implementation.

Shapes: T tokens of the step, D hidden size, F MLP size, N query heads, K kv heads, X = N + K,
Z = N + 2 K, H head_dim, S samples of the step or of the previous one, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F

from baton_engine.attention.cpu_bf16 import rms_norm
from baton_engine.attention.interface import StepAttention
from baton_engine.cpu_kernels.experts import PackedExperts, multiply_experts
from baton_engine.cpu_kernels.norm import add_norm, can_norm
from baton_engine.cpu_kernels.rope_store import can_rotate_store, rotate_store
from baton_engine.cpu_kernels.silu import silu_mul
from baton_engine.layers.experts import (
    Experts,
    LoadedExperts,
    Routes,
    experts_twin,
    packed_experts,
)
from baton_engine.layers.quantization.cpu_experts import (
    QuantizedCPUExperts,
    multiply_quantized_experts,
)
from baton_engine.layers.rotary import HeadNorm, RopeTables, rotate
from baton_engine.sampling.metadata import Draws
from baton_engine.sampling.sampler import draw

SQRT_2_OVER_PI = math.sqrt(2 / math.pi)


class Ops(Protocol):
    def add_norm(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        weight_D: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """Add delta, if given, to x in place. Returns RMSNorm of the sum, a new tensor [T, D]."""
        ...

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up, [T, F], from [T, 2 F] with gate before up. May overwrite the
        argument."""
        ...

    def gelu_tanh_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        """The same with gelu(gate), in its approximation by tanh."""
        ...

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
        """Normalise and rotate q and k, store k and v, and return the attention outputs [T, N, H].
        `heads_TZH` has q, k and v in this order, and may be overwritten. For `sinks_N`, see
        StepAttention."""
        ...

    def pack_experts(self, weights: LoadedExperts) -> Experts:
        """The weights as experts() reads them fastest, once they are loaded. May overwrite
        them."""
        ...

    def experts(self, x_TD: torch.Tensor, routes: Routes, weights: Experts) -> torch.Tensor:
        """The sum [T, D] of the outputs of each token's experts, times their weights. See
        `layers.experts`. A token's bits do not depend on other tokens if the weights are from
        pack_experts()."""
        ...

    def draw(self, logits_SV: torch.Tensor, draws: Draws) -> torch.Tensor:
        """The token of each sample, int64 [S], from float32 logits that are already changed as the
        requests ask."""
        ...

    def put_sampled(
        self, tokens_T: torch.Tensor, awaits_T: torch.Tensor, ids_S: torch.Tensor
    ) -> None:
        """Replace each awaited token (see StepArrays) in place by the id that the previous step
        sampled for it."""
        ...


class TorchOps:
    """On a CPU, bits for a token do not depend on the number of tokens."""

    def pack_experts(self, weights: LoadedExperts) -> Experts:
        return packed_experts(weights)

    def experts(self, x_TD: torch.Tensor, routes: Routes, weights: Experts) -> torch.Tensor:
        if isinstance(weights, PackedExperts):
            return multiply_experts(x_TD, routes.ids_TC, routes.weights_TC, weights)
        if isinstance(weights, QuantizedCPUExperts):
            return multiply_quantized_experts(x_TD, routes.ids_TC, routes.weights_TC, weights)
        return experts_twin(x_TD, routes, weights)

    def draw(self, logits_SV: torch.Tensor, draws: Draws) -> torch.Tensor:
        return draw(logits_SV, draws)

    def add_norm(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        weight_D: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        if can_norm(x_TD):
            return add_norm(x_TD, delta_TD, weight_D, eps)
        if delta_TD is not None:
            x_TD += delta_TD
        return _norm(x_TD, weight_D, eps)

    def silu_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        if gate_up_TF.device.type != "cpu":
            return F.silu(gate_TF).mul_(up_TF)
        return silu_mul(gate_up_TF)

    def gelu_tanh_mul(self, gate_up_TF: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
        return gelu_tanh(gate_TF.float()).to(gate_TF.dtype).mul_(up_TF)

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
        both = (num_heads + heads_TZH.shape[1]) // 2  # N + K
        if can_rotate_store(heads_TZH, rope[0]):
            slots = attention.slots(layer)
            weights = None if norm is None else (norm.weight_XH, norm.eps)
            places = (slots.k_PKBH, slots.v_PKBV), slots.slots_T
            kept = slots.exponents
            exponents = None if kept is None else (kept.k_PKB1, kept.v_PKB1)
            q_TNH = rotate_store(
                *(heads_TZH, num_heads, weights, rope, *places, exponents), rounds=slots.rounds
            )
            k_TKH, v_TKH = heads_TZH[:, num_heads:both], heads_TZH[:, both:]
            return attention.attend(layer, q_TNH, k_TKH, v_TKH, stored=True, sinks_N=sinks_N)
        qk_TXH = heads_TZH[:, :both]
        if norm is not None:
            qk_TXH = _norm(qk_TXH, norm.weight_XH, norm.eps)
        qk_TXH = rotate(qk_TXH, rope)
        q_TNH, k_TKH = qk_TXH[:, :num_heads], qk_TXH[:, num_heads:]
        return attention.attend(layer, q_TNH, k_TKH, heads_TZH[:, both:], sinks_N=sinks_N)

    def put_sampled(
        self, tokens_T: torch.Tensor, awaits_T: torch.Tensor, ids_S: torch.Tensor
    ) -> None:
        found_T = ids_S.index_select(0, awaits_T.clamp(min=0))
        tokens_T.copy_(torch.where(awaits_T >= 0, found_T, tokens_T))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). On a CPU, F.gelu computes the last numbers
    of a tensor with other instructions, so that a number's bits depend on its place."""
    inner = (x * x).mul_(x).mul_(0.044715).add_(x).mul_(SQRT_2_OVER_PI)
    return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if weight.dtype != x.dtype or (x.dtype == torch.bfloat16 and x.device.type == "cpu"):
        return rms_norm(x, weight, eps)
    size = x.shape[-1:]
    if weight.dim() == 1:
        return F.rms_norm(x, size, weight, eps)
    return F.rms_norm(x, size, None, eps) * weight


TORCH_OPS = TorchOps()
