"""Products with quantized weights on a CPU: values of the twin, and the same bits for a row in any
step, with any number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from baton_engine.config.quantization.scheme import BITS, Numbers
from baton_engine.cpu_kernels.openmp import inlined
from baton_engine.cpu_kernels.quantized_block import BlockKind, Decoding, group_product
from baton_engine.cpu_kernels.rounded_rows import int8_rows
from baton_engine.cpu_kernels.vectors import COLUMNS
from baton_engine.layers.experts import (
    ClampedSwiGLU,
    QuantizedExperts,
    Routes,
    experts_twin,
)
from baton_engine.layers.ops import TORCH_OPS
from baton_engine.layers.quantization.cpu_experts import QuantizedCPUExperts
from baton_engine.layers.quantization.cpu_products import quantized_product
from baton_engine.layers.quantization.quantized_weight import (
    TABLES,
    input_codes,
    quantized_twin,
)
from tests.support.engines.kernels import assert_close, noise, poisoned
from tests.support.engines.quantized.random_weights import Case, random_weight

DTYPES = [torch.float32, torch.bfloat16]
KINDS: list[Numbers] = [kind for kind in BITS if BITS[kind] == 8 or kind in TABLES]


# Odd numbers of inputs; several blocks, and one that is not whole; a last group that is not whole;
# a group that is added in several chains.
CASES = [Case(64, 33, 0), Case(130, 90, 16), Case(70, 160, 64), Case(3, 1300, 0)]


def rows_of(case: Case, count: int, dtype: torch.dtype) -> torch.Tensor:
    return noise(count, case.inputs, dtype=dtype, seed=count).cpu()


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numbers", KINDS)
def test_products_are_the_twins_and_a_row_has_the_same_bits_in_any_step(
    numbers: Numbers, dtype: torch.dtype
) -> None:
    for case in CASES:
        for shifted in (False, True):
            weight, bias = random_weight(numbers, case, shifted=shifted), noise(case.outputs).cpu()
            product = quantized_product(weight, bias)
            exact = quantized_product(weight, bias, torch.float32)
            x = rows_of(case, 33, dtype)
            with poisoned():
                whole = exact(x)
                assert_close(whole, quantized_twin(weight, bias, torch.float32)(x))
                assert torch.equal(product(x), whole.to(dtype))
                for first, count in ((0, 1), (31, 2), (4, 3), (5, 7), (7, 8), (9, 15), (2, 25)):
                    some = slice(first, first + count)
                    assert torch.equal(exact(x[some]), whole[some]), (case, shifted, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_many_rows_and_one_thread_give_the_same_bits(dtype: torch.dtype) -> None:
    case = Case(130, 90, 32)
    product = quantized_product(random_weight("int8", case, shifted=True), None)
    x = rows_of(case, 400, dtype)
    whole = product(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.cat([product(row) for row in torch.split(x, 1)])
    torch.set_num_threads(threads)
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("activations", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_rounded_and_ordered_as_the_weight_asks(
    dtype: torch.dtype, activations: Numbers
) -> None:
    case = Case(64, 96, 32)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(0))
    x = rows_of(case, 7, dtype)
    for scale in (None, 0.03):
        weight = dataclasses.replace(
            random_weight(activations, case),
            activations=activations,
            input_scale=scale,
            order_I=order,
        )
        # The twin orders the weight, and rounds before.
        twin = quantized_twin(weight, None, torch.float32)(x)
        assert_close(quantized_product(weight, None, torch.float32)(x), twin)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_int8_inputs_are_the_twins_to_the_bit(dtype: torch.dtype) -> None:
    x = rows_of(Case(1, 36, 0), 9, dtype)
    x[4] = 0
    for scale in (None, 0.01):
        twin, twin_scales = input_codes(x, "int8", scale)
        codes, scales = int8_rows(x, scale)
        assert torch.equal(codes, twin.to(torch.int8))
        assert torch.equal(scales, twin_scales.flatten())


def test_a_row_of_int8_inputs_has_the_same_bits_among_any_rows() -> None:
    case = Case(130, 96, 32)
    weight = dataclasses.replace(random_weight("int8", case), activations="int8")
    x, product = rows_of(case, 33, torch.bfloat16), quantized_product(weight, None)
    whole = product(x)
    assert torch.equal(torch.cat([product(row) for row in torch.split(x, 1)]), whole)


def test_a_group_that_ends_within_a_pair_is_computed_by_the_twin() -> None:
    case = Case(64, 96, 3)
    weight, x = random_weight("int8", case), rows_of(case, 3, torch.float32)
    assert torch.equal(quantized_product(weight, None)(x), quantized_twin(weight, None)(x))


@pytest.mark.parametrize("clamped", [False, True], ids=["silu", "clamped, with biases"])
@pytest.mark.parametrize("numbers", ["int4", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_are_the_twins_and_a_token_has_the_same_bits_in_any_step(
    dtype: torch.dtype, numbers: Numbers, clamped: bool
) -> None:
    gate_up, down = Case(80, 96, 32), Case(96, 40, 0)
    weights = QuantizedExperts(
        random_weight(numbers, gate_up, experts=(6,)), random_weight(numbers, down, experts=(6,))
    )
    if clamped:
        weights = dataclasses.replace(
            weights,
            gate_up_bias_EG=noise(6, 80).cpu(),
            down_bias_ED=noise(6, 96, seed=1).cpu(),
            clamped=ClampedSwiGLU(1.7, 0.8),
        )
    packed = TORCH_OPS.pack_experts(weights)
    assert isinstance(packed, QuantizedCPUExperts)
    x, factors = rows_of(gate_up, 23, dtype), noise(23, 2, seed=3).cpu().abs()
    ids = noise(23, 6, seed=4).cpu().topk(2).indices.sort(-1).values
    whole = TORCH_OPS.experts(x, Routes(ids, factors), packed)
    assert whole.dtype == dtype
    assert_close(whole, experts_twin(x, Routes(ids, factors), weights))
    for first, count in ((0, 1), (9, 14), (22, 1)):
        some = slice(first, first + count)
        assert torch.equal(
            TORCH_OPS.experts(x[some], Routes(ids[some], factors[some]), packed), whole[some]
        )


@pytest.mark.parametrize(
    ("bits", "decoding", "dtype"),
    [
        (4, "table", torch.float32),
        (4, "table", torch.bfloat16),
        (8, "int8", torch.float32),
        (8, "fp8", torch.bfloat16),
        (32, "fp32", torch.float32),
    ],
    ids=str,
)
def test_sums_have_the_same_bits_with_any_registers_and_instructions(
    bits: int, decoding: Decoding, dtype: torch.dtype
) -> None:
    pairs, bf16 = 5, dtype == torch.bfloat16
    codes = torch.randint(0, 0x77, (pairs, 16 * bits), dtype=torch.uint8)
    x, scales = noise(2, 2 * pairs, dtype=dtype).cpu(), noise(COLUMNS, seed=1).cpu()
    exact = torch.arange(16.0) - 8
    starts, places = torch.zeros(2), np.array([row.data_ptr() for row in x], np.int64)
    features = llvm.get_host_cpu_features()
    wide = bool(features.get("avx512f"))
    native = bf16 and bits == 4 and bool(features.get("avx512bf16"))
    found = []
    for use_native, use_wide in {(False, False), (False, wide), (native, wide)}:
        kind = BlockKind(bits, decoding, bf16, use_native, use_wide)
        table = torch.cat([exact, exact]).bfloat16() if use_native else exact
        totals = torch.zeros(2, COLUMNS)
        _called(group_product(2, kind, unpacked=False))(
            *(codes.data_ptr(), places.ctypes.data, 0, pairs, 1, table.data_ptr()),
            *(starts.data_ptr(), scales.data_ptr(), totals.data_ptr()),
        )
        found.append(totals)
    assert found[0].abs().sum() > 0
    assert all(torch.equal(each, found[0]) for each in found)


def _called(multiply: Any) -> Any:
    def call(
        codes: int,
        places: int,
        offset: int,
        pairs: int,
        groups: int,
        tables: int,
        starts: int,
        scales: int,
        totals: int,
    ) -> None:
        multiply(codes, places, offset, pairs, groups, tables, starts, scales, totals, codes, 0)

    return inlined(call)
