"""Weights and step of a layer with a latent cache, for the memory estimate. No torch.

Shapes: D hidden size, N query heads, L numbers of a latent row, R of its latent.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.config.latent import LatentConfig
from baton_engine.config.layer_counts import LayerCounts, TokenNumbers, mlp_step, mlp_weights
from baton_engine.config.linear_shapes import LinearShape, Names, mlp_linears
from baton_engine.config.model_config import ModelConfig

# The names of layers in checkpoints.
NAMES = Names(shared="shared_experts")


def layer_weights(config: ModelConfig, layer: int) -> int:
    return _attention_weights(config) + mlp_weights(config, layer) + 2 * config.hidden_size


def layer_step(config: ModelConfig, layer: int, kernels: str) -> Sequence[TokenNumbers]:
    return _attention_step(config), *mlp_step(config, layer, kernels)


def layer_linears(config: ModelConfig, layer: int) -> Sequence[LinearShape]:
    """Without kv_b_proj, whose weight is never kept quantized."""
    here = f"model.layers.{layer}"
    return (
        *_attention_linears(config, f"{here}.self_attn"),
        *mlp_linears(config, layer, here, NAMES),
    )


LATENT_COUNTS = LayerCounts(layer_weights, layer_step, layer_linears)


def _latent(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None, "a config without latent attention"
    return config.latent


def _attention_weights(config: ModelConfig) -> int:
    latent, hidden, heads = _latent(config), config.hidden_size, config.num_heads
    queries, rank = heads * (latent.key_dim + latent.rope_dim), latent.query_rank
    weights = (hidden + config.qkv_bias) * latent.row + latent.rank
    weights += latent.rank * heads * (latent.key_dim + latent.value_dim)
    weights += hidden * (heads * latent.value_dim + config.output_bias)
    if rank is None:
        return weights + hidden * queries
    return weights + (hidden + config.qkv_bias + 1 + queries) * rank


def _attention_linears(config: ModelConfig, here: str) -> Sequence[LinearShape]:
    latent, hidden, heads = _latent(config), config.hidden_size, config.num_heads
    queries, rank = heads * (latent.key_dim + latent.rope_dim), latent.query_rank
    both = [
        LinearShape(f"{here}.kv_a_proj_with_mqa", latent.row, hidden),
        LinearShape(f"{here}.o_proj", hidden, heads * latent.value_dim),
    ]
    if rank is None:
        return [*both, LinearShape(f"{here}.q_proj", queries, hidden)]
    first = LinearShape(f"{here}.q_a_proj", rank, hidden)
    return [*both, first, LinearShape(f"{here}.q_b_proj", queries, rank)]


def _attention_step(config: ModelConfig) -> TokenNumbers:
    """q and its rotated part; the queries of latent rows, in parts and joined (2 N L); the outputs
    (N R) and what they become."""
    latent, heads = _latent(config), config.num_heads
    queries = heads * (latent.key_dim + 2 * latent.rope_dim) + (latent.query_rank or 0)
    rows = 3 * latent.row
    outputs = heads * (latent.rank + latent.value_dim)
    return TokenNumbers(queries + 2 * heads * latent.row + rows + outputs)
