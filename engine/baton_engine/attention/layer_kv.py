"""The K and V of each layer as views of the pool, for kernels and for torch's operators.

In: the pool and the layers' attention. Out: a LayerKV per layer, made once.

Shapes: P blocks of the pool, K kv heads, B block size, H head_dim, V numbers of a head of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from baton_engine.attention.interface import Exponents
from baton_engine.config.model_config import AttentionSpec
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.layout import EXPONENTS, LATENT


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's K and V. Only the last dimension is contiguous. The v of a latent layer is the
    same memory as the first numbers of its k (see AttentionSpec). With `exponents`, both are
    codes."""

    k_PKBH: torch.Tensor
    v_PKBV: torch.Tensor
    exponents: Exponents | None = field(default=None, kw_only=True)


def layers_kv(memory: TorchMemory, specs: Sequence[AttentionSpec]) -> list[LayerKV]:
    """The views of each layer; `specs` has one entry per layer."""
    found = []
    for (group, index), spec in zip(memory.layout.layer_places, specs, strict=True):
        fields = memory.group_fields[group]
        names = (LATENT, LATENT) if spec.latent else ("k", "v")
        keys, values = (fields[name][:, index] for name in names)
        exponents = None
        if names[0] + EXPONENTS in fields:
            exponents = Exponents(*(fields[name + EXPONENTS][:, index] for name in names))
        found.append(LayerKV(keys, values[..., : spec.value_dim], exponents=exponents))
    return found
