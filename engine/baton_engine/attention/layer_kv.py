"""The K and V of each layer as views of the pool, for kernels and for torch's operators.

In: the pool and the layers' attention. Out: a LayerKV per layer, made once.

Shapes: P blocks of the pool, K kv heads, B block size, H head_dim, V numbers of a head of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton_engine.config.model_config import AttentionSpec
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.layout import LATENT


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's K and V. Only the last dimension is contiguous. The v of a latent layer is the
    same memory as the first numbers of its k (see AttentionSpec)."""

    k_PKBH: torch.Tensor
    v_PKBV: torch.Tensor


def layers_kv(memory: TorchMemory, specs: Sequence[AttentionSpec]) -> list[LayerKV]:
    """The views of each layer; `specs` has one entry per layer."""
    found = []
    for (group, index), spec in zip(memory.layout.layer_places, specs, strict=True):
        fields = memory.group_fields[group]
        if spec.latent:
            row_PKBH = fields[LATENT][:, index]
            found.append(LayerKV(row_PKBH, row_PKBH[..., : spec.value_dim]))
        else:
            found.append(LayerKV(fields["k"][:, index], fields["v"][:, index]))
    return found
