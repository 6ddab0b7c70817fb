"""How many weights a layer has, and how many numbers a step holds in it: what a family tells the
memory estimate. No torch.

Families whose layers are those of the common decoder use DECODER; others replace a part of it.

Shapes: T tokens of the step, D hidden size, F inner size of an MLP, N query heads, K kv heads,
Z = N + 2 K, H head_dim, E experts, C experts chosen by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton_engine.config.linear_shapes import LinearShape, decoder_linears
from baton_engine.config.model_config import ModelConfig


class TokenNumbers(NamedTuple):
    """Numbers that a step holds per token, in the compute dtype and in float32."""

    compute: int
    float32: int = 0


@dataclass(frozen=True, slots=True)
class LayerCounts:
    """`weights` gives the number of weights of a layer, by its index. `step` gives what a step
    holds in it beside the residual stream, the delta added to it and its norm, which are always
    there: one entry for each part of the layer, of which one is computed at a time. Its last
    argument is the name of the kernels, "torch" or "triton". `linears` gives the linear layers that
    may be quantized."""

    weights: Callable[[ModelConfig, int], int]
    step: Callable[[ModelConfig, int, str], Sequence[TokenNumbers]]
    linears: Callable[[ModelConfig, int], Sequence[LinearShape]] = decoder_linears


def decoder_weights(config: ModelConfig, layer: int) -> int:
    norms = (4 if config.norms_after else 2) * config.hidden_size
    return attention_weights(config) + mlp_weights(config, layer) + norms


def decoder_step(config: ModelConfig, layer: int, kernels: str) -> Sequence[TokenNumbers]:
    return attention_step(config), *mlp_step(config, layer, kernels)


DECODER = LayerCounts(decoder_weights, decoder_step)


def attention_weights(config: ModelConfig) -> int:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * width, config.num_kv_heads * width
    weights = hidden * (2 * queries + 2 * keys) + 2 * width * config.qk_norm
    weights += config.num_heads * config.attention_sinks
    return weights + (queries + 2 * keys) * config.qkv_bias + hidden * config.output_bias


def attention_step(config: ModelConfig) -> TokenNumbers:
    """q, k and v, their rotated copies and the output: 2 Z H + N H."""
    heads = config.num_heads + 2 * config.num_kv_heads
    return TokenNumbers((2 * heads + config.num_heads) * config.head_dim)


def mlp_weights(config: ModelConfig, layer: int) -> int:
    """The weights of the layer's MLP, or of its router, all its experts and its shared MLP."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None or not experts.layers[layer]:
        return _gated_weights(config, config.intermediate_size)
    weights = experts.num_experts * (hidden + experts.choice_bias)
    weights += experts.num_experts * 3 * hidden * experts.size
    weights += experts.num_experts * (1 + 2 * experts.size + hidden) * experts.bias
    if experts.shared_size:
        weights += _gated_weights(config, experts.shared_size) + hidden * experts.shared_gate
    return weights


def mlp_step(config: ModelConfig, layer: int, kernels: str) -> Sequence[TokenNumbers]:
    """Gate, up and product (4 F) of an MLP. With experts, the router's logits and what follows from
    them (4 E), for each chosen expert its inner numbers and its output (F + D), and sums (3 D);
    then the shared MLP, beside the sum of the experts' outputs. Without kernels for experts, the
    tokens of one expert take as much as four experts."""
    experts, hidden = config.experts, config.hidden_size
    if experts is None or not experts.layers[layer]:
        return (_gated_step(config, config.intermediate_size, kernels),)
    chosen = TokenNumbers(
        max(experts.top_k, 4) * (experts.size + hidden) + hidden,
        3 * hidden + 4 * experts.num_experts,
    )
    if not experts.shared_size:
        return (chosen,)
    shared = _gated_step(config, experts.shared_size, kernels)
    return chosen, TokenNumbers(shared.compute + 2 * hidden, shared.float32)


def _gated_weights(config: ModelConfig, size: int) -> int:
    hidden = config.hidden_size
    return 3 * hidden * size + (2 * size + hidden) * config.mlp_bias


def _gated_step(config: ModelConfig, size: int, kernels: str) -> TokenNumbers:
    if config.activation == "gelu_tanh" and kernels == "torch":
        return TokenNumbers(2 * size, 2 * size)  # the gate and its gelu are in float32
    return TokenNumbers(4 * size)
