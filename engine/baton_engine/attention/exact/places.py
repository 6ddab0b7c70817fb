"""Where in a step the tokens of a group are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Tokens of a step: a slice if they are consecutive, else their indexes.
Places = slice | torch.Tensor


def places_of(indexes: Sequence[int]) -> Places:
    first, last = indexes[0], indexes[-1]
    if last - first + 1 == len(indexes):
        return slice(first, last + 1)
    return torch.tensor(indexes)
