"""Rounding of a row to the numbers that 8-bit codes have, in Triton's kernels. Torch twin:
`kv.eight_bits.rounded` in int8.

In: the numbers of a row in float32, and the bits of the largest one. Out: code * 2^exponent.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The sum of a float32 below 2^22 and this has no bits after the point: the sum rounds to nearest,
# ties to even. The difference is the rounded number.
_WHOLE: tl.constexpr = tl.constexpr(12582912.0)


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """The bits of |x| as integers, which have the numbers' order, infinity and NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rounded_to_codes(x: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """`largest` is the largest magnitude() of the row of x, and broadcasts to x."""
    # 121 is that of the largest float32: rows that are not finite overflow nowhere.
    exponent = tl.minimum(tl.maximum((largest >> 23) - 133, -126), 121)
    # A power of 2 is its exponent in the bits of a float32.
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
    code = x * inverse
    code = (code + _WHOLE) - _WHOLE
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    # A code has no sign if it is 0.
    number = tl.where(code == 0.0, 0.0, code * scale)
    return tl.where(largest >= 0x7F800000, float("nan"), number)
