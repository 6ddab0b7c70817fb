"""Rows of KV as 8-bit codes and one power of two per row.

In: rows of numbers [..., H]. Out: codes [..., H] and exponents [..., 1], and back. A number is
code * 2^exponent. This is exact in bfloat16 and in float32, because a code has at most 7 bits, so a
row that was rounded once is encoded and decoded without a further change:

- with `--kv-cache-dtype`, the pool holds codes and exponents, and kernels read these;
- with `--store-codec`, the pool holds the rounded numbers, and the KV store codes and exponents.

Both give the same answers, bit for bit. The exponent of a row is that of its largest number, so the
codes are those of a scale per token and head, at most twice as coarse as with a scale of
max|x| / 127. A row with an infinite number or NaN becomes NaN.
"""

from __future__ import annotations

import torch

# Bits before the point of the largest code: |x| / 2^exponent is below 2^bits.
CODE_BITS = {torch.int8: 7, torch.float8_e4m3fn: 8}
LARGEST_INT8 = 127
# Below it, a code of 1 is a subnormal number, which kernels may take for 0.
LOWEST_EXPONENT = -126
# The power of two of the smallest code.
SMALLEST_POWER = {torch.int8: 0, torch.float8_e4m3fn: -9}
NOT_FINITE = 127  # the exponent of a row of NaN


def encoded(x: torch.Tensor, code: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes [..., H] of rows x, float32 or bfloat16, and their exponents [..., 1], int8.
    `code` is int8 (rounded to the nearest, ties to even) or float8_e4m3fn."""
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    _, powers = torch.frexp(largest)
    lowest = LOWEST_EXPONENT - SMALLEST_POWER[code]
    exponents = (powers - CODE_BITS[code]).clamp_(min=lowest)
    exponents.masked_fill_(largest == 0, lowest)
    scaled = torch.ldexp(wide, -exponents)
    if code == torch.int8:
        scaled = scaled.round_().clamp_(-LARGEST_INT8, LARGEST_INT8)
    finite = largest.isfinite()
    codes = torch.where(finite, scaled, 0.0).to(code)
    return codes, torch.where(finite, exponents, NOT_FINITE).to(torch.int8)


def decoded(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers [..., H] in `dtype`, float32 or bfloat16."""
    numbers = torch.ldexp(codes.float(), exponents.int()).to(dtype)
    # After the conversion, which gives NaN other bits.
    return numbers.masked_fill_(exponents == NOT_FINITE, torch.nan)


def factors(exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What codes are multiplied by: powers of two, or NaN."""
    powers = (exponents.int() + 127 << 23).view(torch.float32)
    return powers.masked_fill_(exponents == NOT_FINITE, torch.nan).to(dtype)


def rounded(x: torch.Tensor, code: torch.dtype = torch.int8) -> torch.Tensor:
    """Return rows x with each number rounded to one that a code has, in the dtype of x."""
    return decoded(*encoded(x, code), x.dtype)
