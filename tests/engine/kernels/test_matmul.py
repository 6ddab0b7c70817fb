"""Products with a fixed tile: values of torch, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from baton_engine.attention.exact.row_rule import Product, row_rule
from baton_engine.layers.triton_matmul import FIXED_TILE, FIXED_TILE_HEAD, LEAST_TILES, tile_of
from tests.support.engines.kernels import can_compute, noise, poisoned

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
# Sizes that are no multiples of a tile's, and some that are.
SHAPES = [(64, 128), (70, 100), (1, 33)]  # outputs, inputs
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_equal_those_of_torch(
    shape: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    can_compute(dtype)
    x, weight = noise(67, shape[1], dtype=dtype, seed=1), noise(*shape, dtype=dtype, seed=2)
    bias = noise(shape[0], dtype=dtype, seed=3) if biased else None
    product = FIXED_TILE.product(weight, bias)
    with poisoned():
        actual = product(x)
    assert actual.dtype == dtype
    expected = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=10 * tolerance)


def test_logits_are_float32_for_weights_of_16_bits() -> None:
    x, weight = noise(3, 64, dtype=torch.float16), noise(50, 64, dtype=torch.float16, seed=1)
    logits = FIXED_TILE_HEAD.product(weight, None)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits.double(), x.double() @ weight.double().T, rtol=1e-6, atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_for_any_number_of_rows_and_at_any_place(
    dtype: torch.dtype,
) -> None:
    can_compute(dtype)
    x, weight = noise(70, 100, dtype=dtype, seed=1), noise(40, 100, dtype=dtype, seed=2)
    product = FIXED_TILE.product(weight, None)
    whole = product(x)
    for begin, end in ((0, 1), (0, 16), (5, 6), (63, 65), (69, 70)):
        assert torch.equal(product(x[begin:end]), whole[begin:end]), f"rows {begin} to {end}"


def test_memory_after_the_rows_is_not_read() -> None:
    buffer = noise(5, 40)
    buffer[3:] = torch.nan
    assert bool(FIXED_TILE.product(noise(20, 40, seed=1), None)(buffer[:3]).isfinite().all())


def test_the_start_up_test_passes_the_product_and_finds_one_that_depends_on_the_rows() -> None:
    weight = noise(40, 128, seed=1)
    product = FIXED_TILE.product(weight, None)

    def switching(x: torch.Tensor) -> torch.Tensor:
        """From 16 rows on, halves of the inputs are added: split-K."""
        if len(x) < 16:
            return product(x)
        halves = zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)
        parts = [FIXED_TILE.product(half.contiguous(), None)(some) for some, half in halves]
        return parts[0] + parts[1]

    def permitted(tested: Product) -> tuple[int, ...]:
        return row_rule(tested, weight, None, FIXED_TILE.counts).counts

    assert permitted(product) == FIXED_TILE.counts
    assert permitted(switching) != FIXED_TILE.counts


def test_a_tile_depends_on_the_weight_only_and_is_narrow_for_few_outputs() -> None:
    widths = [tile_of(outputs, 2).outputs for outputs in (1, 1024, 64 * LEAST_TILES, 151_936)]
    assert widths == [32, 32, 64, 128]
