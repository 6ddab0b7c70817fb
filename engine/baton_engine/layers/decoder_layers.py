"""Parts of a decoder layer: linear, RMSNorm, gated MLP and attention with fused projections.

Families override the methods `make_...`, which declare weights, if their checkpoints have other
tensors.

Shapes: T tokens of the step, D hidden size, F MLP size, O and I a linear's out and in,
N query heads, K kv heads, X = N + K, Z = N + 2 K, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import ModelConfig
from baton_engine.layers.linear_method import plain_product
from baton_engine.layers.linear_weights import LinearWeights, in_order, product_of
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
        dtype: torch.dtype | None = None,
    ) -> None:
        """The weight has the compute dtype, unless `dtype` is another."""
        self.shape = (sum(rows), width)  # out, in
        self._names, self._rows = prefixes, rows
        self._weights = LinearWeights(slots, prefixes, rows, width, dtype)
        names = [f"{prefix}.bias" for prefix in prefixes]
        self._bias_O = slots.stacked(names, rows, dtype=dtype) if bias else None
        self._order_O: torch.Tensor | None = None
        self._product: Product
        if self._weights.plain_OI is not None:
            self._product = plain_product(self._weights.plain_OI, self._bias_O)
        slots.when_filled(lambda: self._pack(slots))

    def reorder(self, order_O: torch.Tensor) -> None:
        """Give the outputs of a single projection another order, once they are loaded."""
        assert len(self._names) == 1, "several projections"
        self._order_O = order_O

    def _pack(self, slots: WeightSlots) -> None:
        weights = self._weights.take()
        if self._order_O is not None:
            [weight] = weights
            weights = [in_order(weight, self._order_O)]
            if self._bias_O is not None:
                self._bias_O = in_order(self._bias_O, self._order_O)
        biases: Sequence[torch.Tensor | None] = [self._bias_O]
        if len(weights) > 1:
            biases = [None] * len(weights)
            if self._bias_O is not None:
                biases = torch.split(self._bias_O, [*self._rows])
        parts = zip(self._names, weights, biases, strict=False)
        self._product = product_of([slots.product(*part) for part in parts])

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self._product(x_TI)


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, slots: WeightSlots, name: str, size: int, eps: float) -> None:
        self.weight_D = self.make_weight(slots, f"{name}.weight", size)
        self._eps = eps
        self._ops = slots.ops

    def make_weight(self, slots: WeightSlots, name: str, size: int) -> torch.Tensor:
        return slots.tensor(name, size)

    def __call__(self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Add delta, if given, to x in place, and return the norm of x (a new tensor [T, D])."""
        return self._ops.add_norm(x_TD, delta_TD, self.weight_D, self._eps)


class GatedMLP:
    """down(activation(gate(x)) * up(x)). gate and up are computed as one product. `size` is the
    number of their outputs, by default the config's."""

    def __init__(
        self, slots: WeightSlots, name: str, config: ModelConfig, size: int | None = None
    ) -> None:
        size = config.intermediate_size if size is None else size
        self._gate_up = self.make_gate_up(slots, name, config, size)
        sizes = [config.hidden_size], size
        self._down = Linear(slots, [f"{name}.down_proj"], *sizes, config.mlp_bias)
        self._ops, self._activation = slots.ops, config.activation

    def make_gate_up(self, slots: WeightSlots, name: str, config: ModelConfig, size: int) -> Linear:
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        return Linear(slots, names, [size, size], config.hidden_size, config.mlp_bias)

    def __call__(self, x_TD: torch.Tensor) -> torch.Tensor:
        gate_up_TF = self._gate_up(x_TD)
        if self._activation == "silu":
            return self._down(self._ops.silu_mul(gate_up_TF))
        return self._down(self._ops.gelu_tanh_mul(gate_up_TF))


class Attention:
    """qkv projection, rope, the backend's attention over the paged cache, output projection."""

    def __init__(self, slots: WeightSlots, name: str, layer: int, config: ModelConfig) -> None:
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        self._qkv = self.make_qkv(slots, name, config)
        self._out = Linear(
            slots, [f"{name}.o_proj"], [config.hidden_size], n * h, config.output_bias
        )
        self._layer = layer
        self._heads = (n, k, h)
        self._norm: HeadNorm | None = None  # norm of each head of q and k before rope
        if config.qk_norm:
            self._declare_norm(slots, name, config)
        self._sinks_N: torch.Tensor | None = None
        if config.attention_sinks:
            self._sinks_N = slots.tensor(f"{name}.sinks", n, dtype=torch.float32)
        self._ops = slots.ops

    def _declare_norm(self, slots: WeightSlots, name: str, config: ModelConfig) -> None:
        """The norms of q and k are computed as one norm with a weight per head."""
        n, k, h = self._heads
        q_weight_H = slots.tensor(f"{name}.q_norm.weight", h)
        k_weight_H = slots.tensor(f"{name}.k_norm.weight", h)

        def join() -> None:
            weight_XH = torch.cat([q_weight_H.expand(n, -1), k_weight_H.expand(k, -1)])
            self._norm = HeadNorm(weight_XH, config.norm_eps)

        slots.when_filled(join)

    def make_qkv(self, slots: WeightSlots, name: str, config: ModelConfig) -> Linear:
        n, k, h = config.num_heads, config.num_kv_heads, config.head_dim
        names = [f"{name}.{part}_proj" for part in "qkv"]
        return Linear(slots, names, [n * h, k * h, k * h], config.hidden_size, config.qkv_bias)

    def project(self, x_TD: torch.Tensor) -> torch.Tensor:
        """q, k and v of each token in this order, before the norm of heads and rope."""
        return self._qkv(x_TD)

    def __call__(
        self, x_TD: torch.Tensor, rope: RopeTables, attention: StepAttention
    ) -> torch.Tensor:
        n, k, h = self._heads
        heads_TZH = self.project(x_TD).view(-1, n + 2 * k, h)
        out_TNH = self._ops.attend(
            heads_TZH, n, self._norm, rope, self._layer, attention, self._sinks_N
        )
        return self._out(out_TNH.reshape(-1, n * h))
