"""What transformers calls for the attention of each layer of an encoder, in place of its own.

In: queries, keys and values of one prompt, and a mask in layers with a window. Out: attention
outputs. The bits of torch's fused attention depend on the number of threads, and those of whole
products do not. Some queries are computed at a time, so scores take memory in proportion to the
prompt's length, not to its square.

Shapes: N query heads, K kv heads, T tokens, H size of a head, R queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from baton_engine.config.step_sizes import ENCODER_QUERIES
from baton_engine.errors import UnsupportedModel

# The name by which a model's config asks for this attention.
NAME = "baton-encoder"
# Options with tensors that do not change attention.
KNOWN_TENSORS = frozenset({"position_ids", "cache_position"})


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The outputs [1, T, N, H] of a query [1, N, T, H], a key and a value [1, K, T, H]. The mask
    [1, 1, T, T] says which keys a query sees. Raises UnsupportedModel."""
    _check(module, options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    key_1NHT, parts = key.transpose(2, 3), []
    for start in range(0, query.shape[2], ENCODER_QUERIES):
        rows = slice(start, start + ENCODER_QUERIES)
        scores_1NRT = torch.matmul(query[:, :, rows], key_1NHT).float() * scale
        if attention_mask is not None:
            scores_1NRT.masked_fill_(~attention_mask[:, :, rows], -torch.inf)
        parts.append(torch.matmul(scores_1NRT.softmax(-1).to(value.dtype), value))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


def _check(module: torch.nn.Module, options: dict[str, Any]) -> None:
    asked = options.get("is_causal")
    if getattr(module, "is_causal", False) if asked is None else asked:
        raise UnsupportedModel("its tokens do not see those after them")
    for name, option in options.items():
        unknown = isinstance(option, torch.Tensor) and name not in KNOWN_TENSORS
        if unknown or (name == "softcap" and option is not None):
            raise UnsupportedModel(f"it passes {name} to attention, which Baton does not know")


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
