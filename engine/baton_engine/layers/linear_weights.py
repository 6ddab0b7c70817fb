"""The weight of a linear layer: declared as the layer's scheme says, and joined once it is loaded.

A layer may stack several projections of the same input, and each has a scheme of its own. Weights
of the same kind become one; others are multiplied one after the other.

Shapes: T rows, O and I a linear's output and input size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.layers.parameter import WeightSlots
from baton_engine.layers.quantization.quantized_weight import QuantizedWeight, Weight, joined
from baton_engine.layers.quantization.weight_format import format_of


class LinearWeights:
    """The weights of projections with the same input, whose outputs follow each other."""

    def __init__(
        self,
        slots: WeightSlots,
        names: Sequence[str],
        rows: Sequence[int],
        inputs: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`names` are those of the layers in the checkpoint, and `rows` their numbers of outputs.
        Plain weights have the compute dtype, unless `dtype` is another."""
        self.plain_OI: torch.Tensor | None = None
        self._finish: list[Callable[[], Weight]] = []
        schemes = [slots.scheme_of(name) for name in names]
        if not any(schemes):
            weights = [f"{name}.weight" for name in names]
            self.plain_OI = slots.stacked(weights, rows, inputs, dtype=dtype)
            return
        for name, count, scheme in zip(names, rows, schemes, strict=True):
            if scheme is None:
                plain_OI = slots.tensor(f"{name}.weight", count, inputs, dtype=dtype)
                self._finish.append(_returning(plain_OI))
            else:
                self._finish.append(format_of(scheme).declare(slots, name, count, inputs))

    def take(self) -> list[Weight]:
        """The loaded weights, joined as far as they are of the same kind. Called once: this object
        keeps none of them."""
        if self.plain_OI is not None:
            plain_OI, self.plain_OI = self.plain_OI, None
            return [plain_OI]
        finish, self._finish = self._finish, []
        weights = [make() for make in finish]
        quantized = [each for each in weights if isinstance(each, QuantizedWeight)]
        one = joined(quantized) if len(quantized) == len(weights) else None
        return weights if one is None else [one]


def product_of(products: Sequence[Product]) -> Product:
    """The outputs of several products of the same input, one after the other."""
    if len(products) == 1:
        return products[0]
    return lambda x_TI: torch.cat([product(x_TI) for product in products], 1)


@overload
def in_order(weight: torch.Tensor, order_O: torch.Tensor) -> torch.Tensor: ...


@overload
def in_order(weight: Weight, order_O: torch.Tensor) -> Weight: ...


def in_order(weight: Weight, order_O: torch.Tensor) -> Weight:
    """The weight, or a bias, with its outputs in another order."""
    if isinstance(weight, QuantizedWeight):
        return weight.outputs(order_O)
    return weight[order_O.to(weight.device)]


def _returning(weight_OI: torch.Tensor) -> Callable[[], Weight]:
    return lambda: weight_OI
