"""The vectors that nodes answer with: float32 numbers, little-endian."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_protocol.errors import InternalError
from baton_router.openai.choice_output import ChoiceOutput

FLOAT32 = np.dtype("<f4")
Vector = npt.NDArray[np.float32]


def vector_of(choice: ChoiceOutput) -> Vector:
    """Raise InternalError for a node's answer that is no vector."""
    data = choice.vector
    if not data or len(data) % FLOAT32.itemsize:
        raise InternalError(f"a node answered with {len(data)} bytes, which are no vector")
    vector: Vector = np.frombuffer(data, FLOAT32)
    if not np.isfinite(vector).all():
        raise InternalError("a node answered with a vector whose elements are not all finite")
    return vector


def cosine(first: Vector, second: Vector) -> float:
    """The cosine of the angle between two vectors, -1 to 1; 0 if one of them is 0."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.sqrt(a.dot(a) * b.dot(b)))
    return min(1.0, max(-1.0, float(a.dot(b)) / lengths)) if lengths else 0.0
