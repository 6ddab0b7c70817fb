"""Residual add and RMSNorm in one kernel, against torch and the definition."""

from __future__ import annotations

import pytest
import torch

from baton_engine.layers.ops import TORCH_OPS
from baton_engine.layers.triton_norm import add_norm
from tests.support.engines.kernels import DTYPES, assert_close, can_compute, noise, poisoned

EPS = 1e-5
SHAPES = [(1, 64), (5, 96), (18, 128), (3, 1000), (2, 4096)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_and_its_norm_equal_those_of_torch(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    can_compute(dtype)
    x, delta = noise(*shape, dtype=dtype, seed=1), noise(*shape, dtype=dtype, seed=2)
    weight = noise(shape[1], dtype=dtype, seed=3)
    torch_x = x.clone()
    expected = TORCH_OPS.add_norm(torch_x, delta, weight, EPS)
    with poisoned():
        actual = add_norm(x, delta, weight, EPS)
    assert_close(actual, expected)
    assert torch.equal(x, torch_x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_delta_x_is_unchanged_and_its_norm_equals_the_definition(
    dtype: torch.dtype,
) -> None:
    can_compute(dtype)
    x, weight = noise(7, 80, dtype=dtype), noise(80, dtype=dtype, seed=1)
    before = x.clone()
    with poisoned():
        actual = add_norm(x, None, weight, EPS)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_close(actual, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_in_float32_is_not_rounded_to_the_dtype_of_x(dtype: torch.dtype) -> None:
    can_compute(dtype)
    x, weight = noise(7, 80, dtype=dtype), 1 + noise(80, seed=1) / 1000
    actual = add_norm(x, None, weight, EPS)
    assert actual.dtype == dtype
    assert_close(actual, TORCH_OPS.add_norm(x, None, weight, EPS))


def test_memory_after_the_rows_is_not_read_or_written() -> None:
    buffer = noise(4, 48)
    buffer[3] = torch.nan
    x, delta = buffer[:3], noise(3, 48, seed=1)
    actual = add_norm(x, delta, noise(48, seed=2), EPS)
    assert bool(actual.isfinite().all())
    assert bool(buffer[3].isnan().all())
