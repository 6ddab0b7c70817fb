"""Products with a fixed tile: values of torch, and the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch

from baton_engine.attention.exact.row_rule import Product, row_rule
from baton_engine.config.step_sizes import STORED_SPLIT_BYTES
from baton_engine.layers.triton_matmul import (
    FIXED_TILE,
    FIXED_TILE_HEAD,
    LEAST_TILES,
    tile_of,
)
from baton_engine.layers.triton_splits import STORED_ROWS
from tests.support.engines.kernels import can_compute, noise, poisoned
from tests.support.engines.launches import launches

DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
# Sizes that are no multiples of a tile's, and some that are. The last two have several splits.
SHAPES = [(64, 128), (70, 100), (1, 33), (64, 2048), (70, 1100)]  # outputs, inputs
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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_if_one_program_adds_all_splits_or_a_second_kernel_does(
    dtype: torch.dtype, biased: bool
) -> None:
    can_compute(dtype)
    x, weight = noise(STORED_ROWS + 1, 1100, dtype=dtype, seed=1), noise(40, 1100, dtype=dtype)
    product = FIXED_TILE.product(weight, noise(40, dtype=dtype, seed=3) if biased else None)
    with launches() as found:
        whole = product(x)
    assert [each.kernel for each in found] == ["_matmul"]
    for begin, end in ((0, 1), (0, 48), (47, 48), (63, 65), (120, 129), (1, 129)):
        with launches() as found, poisoned():
            part = product(x[begin:end])
        assert [each.kernel for each in found] == ["_matmul", "_add_splits"]
        assert torch.equal(part, whole[begin:end]), f"rows {begin} to {end}"


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_steps_of_1_to_48_rows(dtype: torch.dtype) -> None:
    can_compute(dtype)
    x, weight = noise(STORED_ROWS + 1, 1100, dtype=dtype, seed=1), noise(40, 1100, dtype=dtype)
    product = FIXED_TILE.product(weight, None)
    whole = product(x)
    for rows in range(1, 49):
        begin = 7 * rows % (STORED_ROWS - rows)
        assert torch.equal(product(x[begin : begin + rows]), whole[begin : begin + rows]), rows


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
    widths = [tile_of(outputs, 64, 2).outputs for outputs in (1, 1024, 64 * LEAST_TILES, 151_936)]
    assert widths == [32, 32, 64, 128]


@pytest.mark.parametrize(
    ("name", "outputs", "inputs", "splits", "programs"),
    [
        ("Qwen3-0.6B's qkv", 4096, 1024, 1, 128),
        ("Qwen3-0.6B's o", 1024, 2048, 8, 256),
        ("Qwen3-0.6B's gate and up", 6144, 1024, 1, 192),
        ("Qwen3-0.6B's down", 1024, 3072, 8, 256),
        ("Qwen3-8B's o", 4096, 4096, 2, 256),
        ("Qwen3-8B's down", 4096, 12_288, 2, 256),
        ("a head", 151_936, 1024, 1, 1187),
        ("one tile", 32, 65_536, 16, 16),
    ],
)
def test_weights_with_few_outputs_and_many_inputs_are_split_until_they_fill_a_device(
    name: str, outputs: int, inputs: int, splits: int, programs: int
) -> None:
    tile = tile_of(outputs, inputs, 2)
    assert tile.splits(inputs) == splits, name
    assert -(-outputs // tile.outputs) * splits == programs, name


def test_stored_splits_need_no_more_memory_than_is_counted_for_them() -> None:
    most = 0
    for item_bytes in (2, 4):
        for outputs in (1, 33, 576, 1024, 2048, 4095, 4096, 8191, 8192, 151_936):
            for inputs in (64, 1024, 3000, 28_672, 1 << 20):
                splits = tile_of(outputs, inputs, item_bytes).splits(inputs)
                most = max(most, 4 * splits * STORED_ROWS * outputs if splits > 1 else 0)
    assert most <= STORED_SPLIT_BYTES // 8
