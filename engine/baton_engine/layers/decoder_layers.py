"""Parts of a decoder layer: linear, RMSNorm, gated MLP and attention with fused projections.

Shapes: T tokens of the step, D hidden size, F MLP size, O and I a linear's out and in,
N query heads, K kv heads, X = N + K, Z = N + 2 K, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.linear_method import packed_product, plain_product
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.rotary import HeadNorm, RopeTables


class Linear:
    """One or several stacked projections of the same input."""

    def __init__(
        self,
        slots: WeightSlots,
        prefixes: Sequence[str],
        rows: Sequence[int],
        width: int,
        bias: bool,
    ) -> None:
        self.shape = (sum(rows), width)  # out, in
        self._weight_OI: torch.Tensor | None = slots.stacked(
            [f"{prefix}.weight" for prefix in prefixes], rows, width
        )
        names = [f"{prefix}.bias" for prefix in prefixes]
        self._bias_O = slots.stacked(names, rows) if bias else None
        self._product = plain_product(self._weight_OI, self._bias_O)
        slots.when_filled(self._pack)

    def _pack(self) -> None:
        assert self._weight_OI is not None
        self._product = packed_product(self._weight_OI, self._bias_O)
        self._weight_OI = None  # the product owns the weight or a packed copy of it

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self._product(x_TI)


class RMSNorm:
    def __init__(self, slots: WeightSlots, name: str, size: int, eps: float) -> None:
        self.weight_D = slots.tensor(f"{name}.weight", size)
        self._eps = eps
        self._ops = slots.ops

    def __call__(self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Add delta, if given, to x in place, and return the norm of x (a new tensor [T, D])."""
        return self._ops.add_norm(x_TD, delta_TD, self.weight_D, self._eps)


class GatedMLP:
    """down(silu(gate(x)) * up(x)). gate and up are computed as one product."""

    def __init__(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        size, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = Linear(slots, names, [size, size], hidden, bias)
        self._down = Linear(slots, [f"{name}.down_proj"], [hidden], size, bias)
        self._ops = slots.ops

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self._down(self._ops.silu_mul(self._gate_up(x_TD)))


class Attention:
    """qkv projection, rope, the backend's attention over the paged cache, output projection."""

    def __init__(self, slots: WeightSlots, name: str, layer: int, config: ModelConfig) -> None:
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        names = [f"{name}.{part}_proj" for part in "qkv"]
        self._qkv = Linear(slots, names, [n * h, k * h, k * h], config.hidden_size, config.qkv_bias)
        self._out = Linear(
            slots, [f"{name}.o_proj"], [config.hidden_size], n * h, config.output_bias
        )
        self._layer = layer
        self._heads = (n, k, h)
        self._norm: HeadNorm | None = None  # norm of q and k before rope
        self._ops = slots.ops

    def __call__(
        self, x_TD: torch.Tensor, rope: RopeTables, attention: StepAttention
    ) -> torch.Tensor:
        n, k, h = self._heads
        heads_TZH = self._qkv(x_TD).view(-1, n + 2 * k, h)
        out_TNH = self._ops.attend(heads_TZH, n, self._norm, rope, self._layer, attention)
        return self._out(out_TNH.view(-1, n * h))


class QKNormAttention(Attention):
    """Qwen3's attention: RMSNorm of each head of q and k before rope, computed as one norm with a
    weight per head."""

    def __init__(self, slots: WeightSlots, name: str, layer: int, config: ModelConfig) -> None:
        super().__init__(slots, name, layer, config)
        q_weight_H = slots.tensor(f"{name}.q_norm.weight", config.head_dim)
        k_weight_H = slots.tensor(f"{name}.k_norm.weight", config.head_dim)
        slots.when_filled(lambda: self._join(q_weight_H, k_weight_H, config.norm_eps))

    def _join(self, q_weight_H: torch.Tensor, k_weight_H: torch.Tensor, eps: float) -> None:
        n, k, _ = self._heads
        weight_XH = torch.cat([q_weight_H.expand(n, -1), k_weight_H.expand(k, -1)])
        self._norm = HeadNorm(weight_XH, eps)
