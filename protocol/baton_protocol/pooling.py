"""What a request asks of a pooling model: a vector of its prompt instead of generated tokens."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# What a node's model answers with: tokens (""), the vector of a text, or the scores of its classes.
Pooling = Literal["", "embed", "classify"]


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """`normalize` scales a vector to length 1. `dimensions` keeps its first elements, before it is
    scaled; None keeps all. `activate` turns the scores of a classifier into probabilities.
    `second_text` is the place at which the second text of a pair begins, for models that tell the
    two apart by token types; 0: the prompt is one text."""

    normalize: bool = True
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    activate: bool = True
    second_text: Annotated[int, Meta(ge=0)] = 0
