"""A linear layer of a head. The checkpoint may have a bias or not, which no config says."""

from __future__ import annotations

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.layers.parameter import WeightSlots


class Projection:
    """Its weight is plain, also in a quantized checkpoint."""

    def __init__(self, slots: WeightSlots, name: str, outputs: int, inputs: int) -> None:
        weight_OI = slots.tensor(f"{name}.weight", outputs, inputs)
        bias_O = slots.tensor(f"{name}.bias", outputs, default=0.0)
        self._product: Product

        def pack() -> None:
            self._product = slots.product(name, weight_OI, bias_O)

        slots.when_filled(pack)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self._product(x_TI)
