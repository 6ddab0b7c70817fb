"""The numbers of all weights of a model, as an engine multiplies them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from baton_engine.attention.exact.row_rule import Product
from baton_engine.config.families import read_config
from baton_engine.layers.experts import Experts, LoadedExperts
from baton_engine.layers.linear_method import LinearMethod
from baton_engine.layers.ops import TorchOps
from baton_engine.layers.parameter import WeightSlots, as_dense
from baton_engine.layers.quantization.quantized_weight import Weight
from baton_engine.models.registry import build_model
from baton_engine.weights.loader import load_weights
from baton_protocol.policies import Quantization

F32 = torch.float32


class RecordingSlots(WeightSlots):
    """Keeps the numbers of each weight, in the order in which layers are finished. Layers may
    overwrite them then."""

    def __init__(self, **more: Any) -> None:
        super().__init__(F32, torch.device("cpu"), _RecordingOps(self), **more)
        self.recorded: list[torch.Tensor] = []

    def record(self, weight: Weight) -> None:
        self.recorded.append(as_dense(weight, F32).flatten().clone())

    def product(
        self,
        name: str,
        weight_OI: Weight,
        bias_O: torch.Tensor | None = None,
        method: LinearMethod | None = None,
    ) -> Product:
        self.record(weight_OI)
        return super().product(name, weight_OI, bias_O, method)


class _RecordingOps(TorchOps):
    def __init__(self, slots: RecordingSlots) -> None:
        self._slots = slots

    def pack_experts(self, weights: LoadedExperts) -> Experts:
        self._slots.record(weights.gate_up_EGD)
        self._slots.record(weights.down_EDF)
        return super().pack_experts(weights)


def numbers_of(
    folder: Path,
    load: Callable[..., None] = load_weights,
    quantization: Quantization = "none",
) -> torch.Tensor:
    """One number after the other: parts of stacked weights follow each other in any case."""
    config = replace(read_config(folder, quantization=quantization), dtype="float32")
    slots = RecordingSlots(quantization=config.quantization)
    build_model(config, slots)
    load(folder, config, slots)
    slots.finish()
    return torch.cat(slots.recorded)
