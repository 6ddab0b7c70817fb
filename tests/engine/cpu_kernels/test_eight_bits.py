"""Compiled rounding to 8-bit codes: the bits of its twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_engine.cpu_kernels.eight_bits import (
    can_encode,
    decode_pieces,
    decode_rows,
    encode_pieces,
    encode_rows,
    rounded_rows,
)
from baton_engine.kv.eight_bits import decoded, encoded, rounded

DTYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


def rows(dtype: torch.dtype, size: int) -> torch.Tensor:
    """Rows of all sizes, and such with zeros, infinity, NaN, and numbers that are rounded to 128 or
    almost."""
    noise = torch.Generator().manual_seed(0)
    powers = torch.arange(-150, 128).float()[:, None]
    x = (torch.rand(278, size, generator=noise) * 2 - 1).mul(torch.exp2(powers)).to(dtype)
    x[20], x[21] = 0.0, -0.0
    x[30, 0], x[31, 1], x[32, 2] = torch.inf, -torch.inf, torch.nan
    x[40, 0], x[40, 1], x[41, 15] = 255.0, -255.0, -254.0
    return x


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    word = DTYPES[expected.dtype]
    assert torch.equal(actual.view(word), expected.view(word))


@pytest.mark.parametrize("size", [48, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_bits_of_the_twin(dtype: torch.dtype, size: int) -> None:
    x = rows(dtype, size)
    assert can_encode(dtype, size)
    codes, exponents = encode_rows(x)
    expected = encoded(x, torch.int8)
    assert torch.equal(codes, expected[0])
    assert torch.equal(exponents, expected[1])
    assert_same_bits(decode_rows(codes, exponents, dtype), decoded(codes, exponents, dtype))
    assert_same_bits(rounded_rows(x), rounded(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_any_shape_are_encoded_and_decoded_in_place(dtype: torch.dtype) -> None:
    narrow, wide = rounded(rows(dtype, 16)), rounded(rows(dtype, 64))
    stored = torch.full((2, 278 * 65 + 1), 77, dtype=torch.int8)
    copies = [torch.empty_like(narrow), torch.empty_like(wide)]

    def pieces(tensors: list[torch.Tensor]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        return np.array(
            [
                (x.data_ptr(), codes.data_ptr(), codes.data_ptr() + x.numel(), *x.shape)
                for x, codes in zip(tensors, stored, strict=True)
            ]
        )

    encode_pieces(pieces([narrow, wide]), dtype)
    decode_pieces(pieces(copies), dtype)
    assert_same_bits(copies[0], narrow)
    assert_same_bits(copies[1], wide)
    assert (stored[0, 278 * 17 :] == 77).all()
    assert stored[1, -1] == 77


def test_rows_that_are_not_whole_vectors_are_not_supported() -> None:
    assert not can_encode(torch.bfloat16, 24)
    assert not can_encode(torch.float16, 64)
