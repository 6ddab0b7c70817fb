from __future__ import annotations

import pytest
import torch

from baton_engine.kv.eight_bits import decoded, encoded, rounded

CODES = torch.int8, torch.float8_e4m3fn


def rows(dtype: torch.dtype) -> torch.Tensor:
    """Rows of all sizes, from numbers below the smallest exponent to the largest ones."""
    noise = torch.Generator().manual_seed(0)
    powers = torch.arange(-150, 126).float()[:, None]
    return (torch.rand(276, 64, generator=noise) * 2 - 1).mul(torch.exp2(powers)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounded_rows_are_encoded_without_loss(dtype: torch.dtype) -> None:
    codes, exponents = encoded(rows(dtype), torch.int8)
    numbers = decoded(codes, exponents, dtype)
    again = encoded(numbers, torch.int8)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], exponents)
    assert torch.equal(decoded(codes, exponents, torch.float32), numbers.float())


@pytest.mark.parametrize(
    ("code", "largest_error"), [(torch.int8, 1 / 128), (torch.float8_e4m3fn, 1 / 16)], ids=str
)
def test_the_error_is_small_beside_the_largest_number(
    code: torch.dtype, largest_error: float
) -> None:
    x = rows(torch.float32)[40:]  # above the smallest exponent
    error = (rounded(x, code) - x).abs().amax(-1) / x.abs().amax(-1)
    assert 0 < error.max() <= largest_error


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_becomes_nan(number: float) -> None:
    x = torch.ones(2, 16)
    x[1, 3] = number
    y = rounded(x)
    assert torch.equal(y[0], x[0])
    assert y[1].isnan().all()


@pytest.mark.parametrize("code", CODES, ids=str)
def test_a_row_of_zeros_stays_zero(code: torch.dtype) -> None:
    assert torch.equal(rounded(torch.zeros(1, 16), code), torch.zeros(1, 16))
