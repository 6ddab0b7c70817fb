"""The linear layers of a module with Baton's products, which are packed for this CPU.

In: a module of transformers with its weights. Out: the same module, whose linear layers multiply
with the linear method of WeightSlots. A layer's weight is freed when it is packed, so weights never
exist twice.

Shapes: T tokens of the step, O and I a linear's output and input size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from baton_engine.layers.linear_method import HEAD
from baton_engine.layers.parameter import WeightSlots


class PackedLinear(torch.nn.Module):
    """`weight` has the shape and dtype of the layer's weight and no numbers: some models ask for
    its dtype."""

    def __init__(
        self, slots: WeightSlots, name: str, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_OI.shape
        self.weight = torch.nn.Parameter(weight_OI.detach().to("meta"), requires_grad=False)
        self._product = slots.product(name, weight_OI, bias_O)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out_TO = self._product(x.reshape(-1, self.in_features))
        return out_TO.view(*x.shape[:-1], self.out_features)


def pack_linears(module: torch.nn.Module, slots: WeightSlots) -> None:
    layers: Any = module
    head = layers.get_output_embeddings()
    # Names, because a list of the modules would keep the weights.
    for name in [name for name, _ in module.named_modules()]:
        parent = module.get_submodule(name)
        for child_name in [child_name for child_name, _ in parent.named_children()]:
            child = parent.get_submodule(child_name)
            if type(child) not in (torch.nn.Linear, Conv1D):
                continue  # a subclass may compute something else
            is_head = child is head
            if is_head and child.bias is not None:
                continue
            path = f"{name}.{child_name}"
            packed = _packed(child, HEAD if is_head else path, slots)
            setattr(parent, child_name, packed)


def _packed(layer: Any, name: str, slots: WeightSlots) -> PackedLinear:
    weight, bias = layer.weight.detach(), layer.bias
    weight_OI = weight.t().contiguous() if isinstance(layer, Conv1D) else weight
    return PackedLinear(slots, name, weight_OI, None if bias is None else bias.detach())
