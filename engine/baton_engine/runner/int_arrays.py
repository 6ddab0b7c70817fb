"""Arrays of integers, as the step's input is made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NONE: Ints = np.zeros(0, np.int64)


def ints_of(numbers: Sequence[int]) -> Ints:
    return np.fromiter(numbers, np.int64, len(numbers))


def run_indexes(begins_R: Ints, counts_R: Ints) -> Ints:
    """Concatenate the ranges [begins[i], begins[i] + counts[i])."""
    before_R = counts_R.cumsum() - counts_R
    return np.arange(counts_R.sum()) + np.repeat(begins_R - before_R, counts_R)
