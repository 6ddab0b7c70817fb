"""What transformers calls for the attention of each layer, in place of its own functions.

In: a layer's queries, keys and values, for all tokens of a step as if they were one sequence. Out:
attention outputs. The layer is known by the order of the calls, which is the same in every step.
transformers builds no masks for a function that has no mask function.

Shapes: T tokens of the step, N query heads, K kv heads, H head_dim of the cache, Q that of queries
and keys, V that of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from baton_engine.attention.interface import StepAttention
from baton_engine.config.model_config import AttentionSpec

# The name by which a model's config asks for this attention.
NAME = "baton"
# The attribute of each module with the function (Attend) that its model's layers call, one after
# the other.
ATTEND = "baton_attend"
# The name by which layers pass their attention sinks.
SINKS = "s_aux"


# Computes attention outputs [1, T, N, V] of a module's query [1, N, T, Q], key [1, K, T, Q] and
# value [1, K, T, V], with the options that transformers passes.
Attend = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, Mapping[str, Any]], torch.Tensor
]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls. The second of its results would be the weights."""
    compute: Attend = getattr(module, ATTEND)
    options["attention_mask"] = attention_mask
    return compute(module, query, key, value, options), None


AttentionInterface.register(NAME, attend)


class StepCalls:
    """The calls of one step after the other, over the paged cache."""

    def __init__(self, specs: Sequence[AttentionSpec]) -> None:
        self._specs = specs
        self._attention: StepAttention | None = None
        self._next = 0

    def begin(self, attention: StepAttention) -> None:
        self._attention, self._next = attention, 0

    def end(self) -> None:
        self._attention = None
        if self._next != len(self._specs):
            raise AssertionError(f"{self._next} calls of attention, not {len(self._specs)}")

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        assert self._attention is not None
        layer, self._next = self._next, self._next + 1
        spec, wide = self._specs[layer], value.shape[-1]
        scale = options.get("scaling")
        if scale is not None and scale != spec.scale:
            raise AssertionError(f"layer {layer} has scale {scale}, not {spec.scale}")
        if options["attention_mask"] is not None:
            raise AssertionError(f"layer {layer} has a mask")
        heads = [
            _padded(tensor[0].transpose(0, 1), spec.head_dim) for tensor in (query, key, value)
        ]
        sinks_N = options.get(SINKS)
        if (sinks_N is not None) != spec.sinks:
            raise AssertionError(f"layer {layer} has other attention sinks than at first")
        sinks_N = None if sinks_N is None else sinks_N.float()
        out_TNH = self._attention.attend(layer, *heads, sinks_N=sinks_N)
        return out_TNH[None, :, :, :wide]


def _padded(heads_TXQ: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Zeros beside a query and a key change no score, and those beside a value are cut off."""
    missing = head_dim - heads_TXQ.shape[-1]
    return F.pad(heads_TXQ, (0, missing)) if missing else heads_TXQ
