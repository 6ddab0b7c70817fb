"""Products whose bits for a row do not depend on the other rows, and the test at an engine's start
that finds numbers of rows with other bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton_engine import build
from baton_engine.attention.exact.row_rule import (
    ROW_COUNTS,
    Product,
    RowRule,
    row_rule,
    with_rule,
)
from baton_engine.errors import SettingsError
from baton_engine.layers.linear_method import (
    HEAD,
    PACKED_HEAD,
    LinearMethod,
    multiplies_by_kernel,
    packed_methods,
    packed_product,
)
from baton_engine.layers.quantization.quantized_weight import Weight
from tests.support.engines.torch_engines import small_engine

SHAPES = {"one group of inputs": (160, 96), "several groups of inputs": (96, 800)}


def random_weight(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    noise = torch.Generator().manual_seed(1)
    return torch.randn(outputs, inputs, generator=noise).to(dtype)


def summed(x_TI: torch.Tensor, weight_OI: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """A product that adds the inputs of a row in `parts` groups."""
    groups = zip(x_TI.float().chunk(parts, 1), weight_OI.float().chunk(parts, 1), strict=True)
    sums = [(x_TJ[:, None] * weight_OJ).sum(-1) for x_TJ, weight_OJ in groups]
    return torch.stack(sums).sum(0).to(x_TI.dtype)


def broken_at(count: int, weight_OI: torch.Tensor) -> Product:
    """A product with another order of additions for exactly `count` rows."""
    return lambda x_TI: summed(x_TI, weight_OI, 4 if len(x_TI) == count else 1)


def check_exact(product: Product, width: int, dtype: torch.dtype) -> None:
    """For many numbers of rows, each row has the bits that it has alone."""
    noise = torch.Generator().manual_seed(2)
    x_TI = torch.randn(600, width, generator=noise).to(dtype)
    alone_TO = torch.cat([product(x_TI[index : index + 1]) for index in range(len(x_TI))])
    for count in (*range(1, 70), 100, 127, 128, 129, 200, 255, 256, 257, 300, 511, 512, 513, 600):
        for first in {0, 600 - count}:
            some = slice(first, first + count)
            assert torch.equal(product(x_TI[some]), alone_TO[some]), f"{count} rows at {first}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_of_a_packed_product_has_the_same_bits_beside_any_number_of_rows(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    weight_OI = random_weight(*shape, dtype)
    bias_O = weight_OI[:, 0].clone() if bias else None
    product = packed_product(weight_OI, bias_O)
    exact = with_rule(product, row_rule(product, weight_OI, bias_O))
    check_exact(exact, shape[1], dtype)
    x_TI = random_weight(50, shape[1], dtype)
    expected = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
    torch.testing.assert_close(exact(x_TI), expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_layer_with_a_method_for_any_rows_needs_no_rule(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """The kernel, on CPUs that have one."""
    weight_OI = random_weight(*shape, dtype)
    x_TI = random_weight(50, shape[1], dtype)
    method = packed_methods("model.layers.0.mlp.up_proj", weight_OI)
    assert method.any_rows == multiplies_by_kernel(weight_OI)
    for bias_O in (None, weight_OI[:, 0].clone()):
        product = method.product(weight_OI, bias_O)
        expected = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
        torch.testing.assert_close(product(x_TI), expected, rtol=1e-2, atol=1e-3)
        if method.any_rows:
            check_exact(product, shape[1], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_with_a_kernel_needs_no_rule(dtype: torch.dtype) -> None:
    """So a step with drafts computes no more rows of the head than it samples."""
    weight_VD = random_weight(96, 64, dtype)
    method = packed_methods(HEAD, weight_VD)
    assert method.any_rows == multiplies_by_kernel(weight_VD)
    if method.any_rows:
        check_exact(method.product(weight_VD, None), 64, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 3, 16, 48, 256])
def test_a_number_of_rows_with_another_order_of_additions_is_found(
    count: int, dtype: torch.dtype
) -> None:
    weight_OI = random_weight(32, 64, dtype)
    product = broken_at(count, weight_OI)
    rule = row_rule(product, weight_OI, None, [each for each in ROW_COUNTS if each <= 256])
    assert set(ROW_COUNTS) - set(rule.counts) == {count, 512}
    check_exact(with_rule(product, rule), 64, dtype)


def test_a_number_of_rows_that_was_not_tested_is_never_computed() -> None:
    weight_OI = random_weight(32, 64, torch.bfloat16)
    product = broken_at(17, weight_OI)
    rule = row_rule(product, weight_OI, None)
    assert rule.counts == ROW_COUNTS
    check_exact(with_rule(product, rule), 64, torch.bfloat16)


@pytest.mark.parametrize("place", [0, 1, 6, 7])
def test_a_product_whose_bits_depend_on_a_rows_place_is_found(place: int) -> None:
    """A row in the first tile of 8 rows has other bits at one place."""
    weight_OI = random_weight(32, 64, torch.bfloat16)

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        y_TO = summed(x_TI, weight_OI)
        if len(x_TI) >= 8:
            y_TO[place] = summed(x_TI, weight_OI, 4)[place]
        return y_TO

    rule = row_rule(product, weight_OI, None)
    assert rule.counts == tuple(count for count in ROW_COUNTS if count < 8)
    check_exact(with_rule(product, rule), 64, torch.bfloat16)


def test_of_numbers_with_different_bits_those_that_cost_least_are_used() -> None:
    """As on a CPU with AMX. Padding few rows costs less than computing a prompt 32 at a time."""
    weight_OI = random_weight(32, 64, torch.bfloat16)

    def product(x_TI: torch.Tensor) -> torch.Tensor:
        return summed(x_TI, weight_OI, 1 if len(x_TI) <= 32 or len(x_TI) > 512 else 2)

    rule = row_rule(product, weight_OI, None)
    assert rule.counts == tuple(count for count in ROW_COUNTS if 32 < count <= 512)


@pytest.mark.parametrize(
    ("counts", "rows", "pieces"),
    [
        ((1, 2, 4), 3, [4]),
        ((1, 2, 4), 4, [4]),
        ((1, 2, 4), 11, [4, 4, 4]),
        ((40, 256), 1, [40]),
        ((40, 256), 41, [40, 40]),
        ((40, 256, 512), 300, [256, 40, 40]),
        ((40, 64, 256, 512), 300, [256, 64]),
        ((64, 512), 450, [512]),
    ],
)
def test_rows_are_padded_or_divided_into_permitted_numbers(
    counts: tuple[int, ...], rows: int, pieces: list[int]
) -> None:
    assert RowRule(counts).pieces(rows) == pieces


def test_equal_products_have_equal_digests_and_others_have_not() -> None:
    weight_OI = random_weight(32, 64, torch.bfloat16)

    def digest(parts: int) -> str:
        return row_rule(lambda x_TI: summed(x_TI, weight_OI, parts), weight_OI, None).digest

    digests = [digest(parts) for parts in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_an_engine_whose_products_depend_on_the_place_refuses_to_be_batch_invariant(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def restless(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Product:
        noise = torch.Generator().manual_seed(0)

        def product(x_TI: torch.Tensor) -> torch.Tensor:
            y_TO = torch.nn.functional.linear(x_TI, weight_OI, bias_O)
            return y_TO + 1e-3 * torch.rand(y_TO.shape, generator=noise)

        return product

    def restless_methods(name: str, weight: Weight) -> LinearMethod:
        return PACKED_HEAD if name == HEAD else LinearMethod(restless)

    monkeypatch.setattr(build, "linear_methods", lambda kernels, *, exact: restless_methods)
    folder = tiny_model("llama-gqa2-tied")
    with pytest.raises(SettingsError, match=r"--batch-invariant on.*--batch-invariant off"):
        small_engine(folder, batch_invariant="on")
    assert small_engine(folder, batch_invariant="off").info.exact == "numeric"
