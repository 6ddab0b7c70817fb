"""The same function by weights in another order: channels of a Llama model are shuffled.

In: a folder of the Llama family, and a new one. Out: the new one's model computes the same
function, up to the order of its sums.

The demo model was published with 4 bits per weight, in groups of 32 inputs. A scheme with the same
groups would find the very grid of each group again, and seem to lose nothing. Behind a shuffle the
inputs of a group come from many groups, as far as rounding is concerned like those of a model that
was never quantized.

Shapes: D hidden channels, F of the MLP, C of a KV head's values, O and I a linear's output and
input size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from baton_engine.config.families import read_config
from tests.support.engines.quantized.quantized_models import WEIGHTS, copy_with


def shuffle_channels(source: Path, folder: Path) -> None:
    config, tensors = read_config(source), load_file(source / WEIGHTS)
    draw = torch.Generator().manual_seed(0)

    def shuffled(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=draw)

    order_D = shuffled(config.hidden_size)
    for name in list(tensors):
        if name.endswith(("embed_tokens.weight", "norm.weight", "lm_head.weight")):
            tensors[name] = tensors[name][..., order_D]
    for layer in range(config.num_layers):
        mlp, attention = f"model.layers.{layer}.mlp", f"model.layers.{layer}.self_attn"
        gate, up, down = (f"{mlp}.{part}_proj.weight" for part in ("gate", "up", "down"))
        order_F = shuffled(len(tensors[gate]))
        for name in (gate, up):
            tensors[name] = tensors[name][order_F][:, order_D]
        tensors[down] = tensors[down][order_D][:, order_F]
        query, key, value, output = (f"{attention}.{part}_proj.weight" for part in "qkvo")
        order_O, order_I = _order_of_values(tensors[value], tensors[output], config.head_dim, draw)
        # The channels of queries and keys belong to angles, and stay.
        for name in (query, key):
            tensors[name] = tensors[name][:, order_D]
        tensors[value] = tensors[value][order_O][:, order_D]
        tensors[output] = tensors[output][order_D][:, order_I]
    copy_with(source, folder, tensors)


def _order_of_values(
    value_OI: torch.Tensor, output_OI: torch.Tensor, head_dim: int, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """An order of the outputs of `v_proj`, within each head, and that of the inputs of `o_proj`
    which reads them: several query heads read one KV head."""
    kv_heads, heads = len(value_OI) // head_dim, output_OI.shape[1] // head_dim
    orders = [torch.randperm(head_dim, generator=draw) for _ in range(kv_heads)]
    per_kv = heads // kv_heads
    values = [kv * head_dim + order_C for kv, order_C in enumerate(orders)]
    inputs = [head * head_dim + orders[head // per_kv] for head in range(heads)]
    return torch.cat(values), torch.cat(inputs)
