"""Numbers of an array in float32 or bfloat16, and exp of 16 of them, for compiled kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton_engine.cpu_kernels.openmp import inlined
from baton_engine.cpu_kernels.vectors import (
    broadcast,
    fma,
    larger,
    load,
    load_bf16,
    multiply,
    nearest_integer,
    power_of_2,
    smaller,
    store,
    store_bf16,
)

# exp(x) is 0 below LOWEST and infinite above HIGHEST.
LOWEST, HIGHEST = np.float32(-88.0), np.float32(89.0)
LOG2_E = np.float32(1.4426950408889634)
# ln 2 in two parts: products of the first with integers up to 127 are exact.
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
# 1 / n! for n from 7 to 2: the Taylor series of exp, to the last bit or two for |x| <= ln(2) / 2.
C7, C6, C5 = np.float32(1 / 5040), np.float32(1 / 720), np.float32(1 / 120)
C4, C3, C2 = np.float32(1 / 24), np.float32(1 / 6), np.float32(0.5)
ZERO, ONE = np.float32(0.0), np.float32(1.0)


@inlined
def exponential(x: Any) -> Any:
    """exp of 16 numbers: 2^n exp(r) with x = n ln 2 + r. Not for NaN."""
    x = smaller(larger(x, broadcast(LOWEST)), broadcast(HIGHEST))
    n = nearest_integer(multiply(x, broadcast(LOG2_E)))
    r = fma(n, broadcast(-LN2_HIGH), x)
    r = fma(n, broadcast(-LN2_LOW), r)
    series = fma(broadcast(C7), r, broadcast(C6))
    series = fma(series, r, broadcast(C5))
    series = fma(series, r, broadcast(C4))
    series = fma(series, r, broadcast(C3))
    series = fma(series, r, broadcast(C2))
    series = fma(series, r, broadcast(ONE))
    series = fma(series, r, broadcast(ONE))
    return multiply(series, power_of_2(n))


@inlined
def number_at(array: int, index: int, bf16: bool) -> Any:
    """16 numbers of an array from an index on, in float32."""
    return load_bf16(array + 2 * index) if bf16 else load(array + 4 * index)


@inlined
def store_numbers(array: int, index: int, values: Any, bf16: bool) -> None:
    """Store 16 numbers; with `bf16` they must be rounded."""
    if bf16:
        store_bf16(array + 2 * index, values)
    else:
        store(array + 4 * index, values)
