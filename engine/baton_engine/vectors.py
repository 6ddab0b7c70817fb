"""The answer of a pooling model, from the numbers of its last token.

In: the last token's hidden state after the final norm, or the scores of its classes. Out: the
vector that a request asks for. Each is computed alone, in float64, so its bits depend on no other
request of the step. numpy only: the simulated engine uses it, too.

Shapes: N numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from baton_protocol.pooling import Pooling, PoolingParams

Numbers = npt.NDArray[Any]
# The wire's: float32, little-endian.
WIRE = np.dtype("<f4")
# Shorter vectors are not scaled to length 1, as in torch's normalize().
LEAST_LENGTH = 1e-12


def answer_of(numbers_N: Numbers, pooling: Pooling, params: PoolingParams) -> bytes:
    """The vector as bytes, for Delta.vector."""
    wide_N = numbers_N.astype(np.float64)
    if pooling == "classify":
        return (_probabilities(wide_N) if params.activate else wide_N).astype(WIRE).tobytes()
    wide_N = wide_N[: params.dimensions]
    if params.normalize:
        wide_N /= max(float(np.sqrt(np.sum(wide_N * wide_N))), LEAST_LENGTH)
    return wide_N.astype(WIRE).tobytes()


def numbers_of(vector: bytes) -> list[float]:
    """The numbers of a vector of answer_of()."""
    numbers: list[float] = np.frombuffer(vector, WIRE).tolist()
    return numbers


def _probabilities(scores_N: Numbers) -> Numbers:
    """The sigmoid of one score, the softmax of several."""
    if len(scores_N) == 1:
        small = np.exp(-np.abs(scores_N))  # does not overflow
        positive: Numbers = np.where(scores_N < 0, small, 1.0) / (1.0 + small)
        return positive
    shares_N = np.exp(scores_N - scores_N.max())
    softmax_N: Numbers = shares_N / shares_N.sum()
    return softmax_N
