"""A layout of quantized checkpoints, as tests write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from baton_protocol.policies import Quantization

# A weight [O, I] in float32 -> the checkpoint's tensors by the last part of their name, and the
# weight that they stand for.
Quantize = Callable[[torch.Tensor], tuple[Mapping[str, torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Layout:
    """`config` is the quantization_config. Layers whose names end with one of `modules` are
    quantized; those whose names end with a key of `others` in another way, or not if it is None.
    With `quantization`, the checkpoint is plain, and the engine quantizes it."""

    config: Mapping[str, Any]
    quantize: Quantize
    modules: tuple[str, ...] = ("_proj", "_with_mqa", ".w1", ".w2", ".w3")
    others: Mapping[str, Quantize | None] = field(default_factory=dict)
    # For tensors of all experts of a layer, whose names get an ending after `_`.
    fused: Quantize | None = None
    quantization: Quantization = "none"

    def quantize_of(self, module: str) -> Quantize | None:
        for ending, quantize in self.others.items():
            if module.endswith(ending):
                return quantize
        return self.quantize if module.endswith(self.modules) else None
