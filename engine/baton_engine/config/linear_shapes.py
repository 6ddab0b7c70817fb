"""The linear layers of a model by name and shape, for the memory estimate of quantized weights. No
torch.

Families whose layers have other names than those of the common decoder replace a part of it.

Shapes: D hidden size, F inner size of an MLP, N query heads, K kv heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton_engine.config.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The weight [outputs, inputs] of a layer, by its name in checkpoints; `count` of them if it is
    that of the first expert."""

    name: str
    outputs: int
    inputs: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a decoder layer's linear layers: of q, k and v, and of gate and up, which may be
    one tensor; of the module with the experts, the parts of an expert (gate, up, down), and the
    MLP that all tokens share."""

    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    gate_up: Sequence[str] = ("gate_proj", "up_proj")
    moe: str = "mlp"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_expert"


def decoder_linears(
    config: ModelConfig, layer: int, names: Names = Names()
) -> Sequence[LinearShape]:
    """The linear layers of a decoder layer, except routers and gates, which are never quantized."""
    here = f"model.layers.{layer}"
    attention = f"{here}.self_attn"
    return (*attention_linears(config, attention, names), *mlp_linears(config, layer, here, names))


def attention_linears(config: ModelConfig, here: str, names: Names) -> Sequence[LinearShape]:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * width, config.num_kv_heads * width
    return (
        *stacked_shapes(here, names.qkv, (queries, keys, keys), hidden),
        LinearShape(f"{here}.o_proj", hidden, queries),
    )


def mlp_linears(config: ModelConfig, layer: int, here: str, names: Names) -> Sequence[LinearShape]:
    experts, hidden = config.experts, config.hidden_size
    if experts is None or not experts.layers[layer]:
        return _gated(f"{here}.mlp", names, config.intermediate_size, hidden)
    gate, up, down = names.expert
    own = replace(names, gate_up=(gate, up))
    moe = f"{here}.{names.moe}"
    chosen = [
        replace(each, count=experts.num_experts)
        for each in _gated(f"{moe}.experts.0", own, experts.size, hidden, down)
    ]
    if not experts.shared_size:
        return chosen
    return (*chosen, *_gated(f"{moe}.{names.shared}", names, experts.shared_size, hidden))


def stacked_shapes(
    here: str, names: Sequence[str], outputs: Sequence[int], inputs: int
) -> Sequence[LinearShape]:
    """A layer for each name, or one for all if there is one name."""
    if len(names) == 1:
        outputs = (sum(outputs),)
    return [
        LinearShape(f"{here}.{name}", count, inputs)
        for name, count in zip(names, outputs, strict=True)
    ]


def _gated(
    here: str, names: Names, size: int, hidden: int, down: str = "down_proj"
) -> Sequence[LinearShape]:
    return (
        *stacked_shapes(here, names.gate_up, (size, size), hidden),
        LinearShape(f"{here}.{down}", hidden, size),
    )
