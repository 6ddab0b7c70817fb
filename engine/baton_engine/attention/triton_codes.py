"""Rows of 8-bit codes and their exponents, for kernels that store or read KV. Twin:
`kv.eight_bits`, with the same bits.

In and out: codes as int8, which are E4M3 if FP8. A code of fp8, shifted by 7 bits, is a float16
that is 2^8 times as small, so no kernel needs a device that knows fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton_engine.attention.interface import Exponents
from baton_engine.kv.eight_bits import (
    CODE_BITS,
    LARGEST_INT8,
    LOWEST_EXPONENT,
    NOT_FINITE,
    SMALLEST_POWER,
)

_INT8_BITS = tl.constexpr(CODE_BITS[torch.int8])
_FP8_BITS = tl.constexpr(CODE_BITS[torch.float8_e4m3fn])
_INT8_LOWEST = tl.constexpr(LOWEST_EXPONENT)
_FP8_LOWEST = tl.constexpr(LOWEST_EXPONENT - SMALLEST_POWER[torch.float8_e4m3fn])
_MOST = tl.constexpr(float(LARGEST_INT8))
_NOT_FINITE = tl.constexpr(NOT_FINITE)
# Adding it to a small number leaves the nearest integer in the last bits.
_ROUND = tl.constexpr(1.5 * 2**23)
_ROUND_FP8 = tl.constexpr(2.0**14)  # the same for multiples of 2^-9
_ROUND_FP8_BITS = tl.constexpr((127 + 14) << 23)


def as_bytes(kv: torch.Tensor, exponents: Exponents | None) -> torch.Tensor:
    """Codes as kernels take them: int8."""
    return kv if exponents is None else kv.view(torch.int8)


def is_fp8(codes: torch.Tensor) -> bool:
    return codes.dtype == torch.float8_e4m3fn


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """The bits of |x| as integers, which have the numbers' order, infinity and NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of(largest: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """The exponents, int32, of rows with these largest magnitude()s."""
    if FP8:
        power = tl.maximum((largest >> 23) - 126 - _FP8_BITS, _FP8_LOWEST)
    else:
        power = tl.maximum((largest >> 23) - 126 - _INT8_BITS, _INT8_LOWEST)
    return tl.where((largest >> 23) == 255, _NOT_FINITE, power)


@triton.jit
def codes_of(x: tl.tensor, exponent: tl.tensor, FP8: tl.constexpr) -> tl.tensor:
    """The codes of float32 numbers of rows with these exponents."""
    inverse = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(exponent == _NOT_FINITE, 0.0, x) * inverse
    if not FP8:
        near = (scaled + _ROUND) - _ROUND
        return tl.minimum(tl.maximum(near, -_MOST), _MOST).to(tl.int8)
    bits = scaled.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    usual = ((size + ((size >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    sums = size.to(tl.float32, bitcast=True) + _ROUND_FP8
    small = sums.to(tl.int32, bitcast=True) - _ROUND_FP8_BITS
    code = tl.where(size < ((127 - 6) << 23), small, usual)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def factors_of(exponent: tl.tensor) -> tl.tensor:
    """What codes of rows with these exponents are multiplied by, float32."""
    power = exponent.to(tl.int32)
    factor = ((power + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(power == _NOT_FINITE, float("nan"), factor)


@triton.jit
def rounded(x: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """eight_bits.rounded() in int8 of float32 numbers of rows with these largest magnitude()s."""
    exponent = exponent_of(largest, False)
    return codes_of(x, exponent, False).to(tl.float32) * factors_of(exponent)


@triton.jit
def stored_row(
    x_D: tl.tensor,
    exponent_ptr: tl.tensor,
    CODED: tl.constexpr,
    FP8: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> tl.tensor:
    """What is stored of one row: its codes, whose exponent is stored here; or the row, or what it
    is rounded to."""
    if CODED:
        wide_D = x_D.to(tl.float32)
        exponent = exponent_of(tl.max(magnitude(wide_D), axis=0), FP8)
        tl.store(exponent_ptr, exponent.to(tl.int8))
        return codes_of(wide_D, exponent, FP8)
    if ROUNDS:
        wide_D = x_D.to(tl.float32)
        return rounded(wide_D, tl.max(magnitude(wide_D), axis=0)).to(x_D.dtype)
    return x_D


@triton.jit
def numbers_of(code: tl.tensor, dtype: tl.constexpr, FP8: tl.constexpr) -> tl.tensor:
    """Codes as numbers, which are then multiplied by factors_of() their rows."""
    if not FP8:
        return code.to(dtype)
    bits = (code.to(tl.int16) << 7) & -0x4001  # without a copy of the sign
    return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
