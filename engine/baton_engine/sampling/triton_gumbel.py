"""The noise of `baton_engine.sampling.gumbel` in a kernel: the same bits, and floats that differ at
most by the rounding of log.

In: a sample's two keys and token ids, int32. Out: float32. -ln(1 - w) needs care: the smallest w
give the largest noise, and a plain 1 - w would lose their digits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from baton_engine.sampling.gumbel import W_MAX

LARGEST_W = tl.constexpr(W_MAX)
# Below this w the series is exact to float32's last bit; above it 1 - w loses no digits.
SERIES_BELOW = tl.constexpr(0.25)


@triton.jit
def noise_bits(a: tl.tensor, b: tl.tensor, token: tl.tensor) -> tl.tensor:
    """32 random bits per token, uint32."""
    bits = _mix(token.to(tl.uint32) ^ a.to(tl.uint32, bitcast=True))
    return _mix(bits + b.to(tl.uint32, bitcast=True))


@triton.jit
def gumbel_noise(a: tl.tensor, b: tl.tensor, token: tl.tensor) -> tl.tensor:
    w = (noise_bits(a, b, token).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    w = tl.minimum(w, LARGEST_W)
    # -ln(1 - w) = 2 artanh(s): s + s^3 / 3 + s^5 / 5 + ..., s < 1 / 7
    s = w / (2.0 - w)
    s2 = s * s
    tail = 1.0 / 5.0 + s2 * (1.0 / 7.0 + s2 * (1.0 / 9.0 + s2 / 11.0))
    near_zero = 2.0 * s * (1.0 + s2 * (1.0 / 3.0 + s2 * tail))
    return -tl.log(tl.where(w < SERIES_BELOW, near_zero, -tl.log(1.0 - w)))


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """MurmurHash3's 32-bit finalizer."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)
