"""Products of a few rows with a block of weights: the same bits with any number of rows, whichever
registers and instructions a CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

from baton_engine.cpu_kernels.openmp import inlined
from baton_engine.cpu_kernels.vectors import COLUMNS, block_product

WORDS, ROWS = 37, 6


def variants(bf16: bool) -> Iterator[tuple[int, Any]]:
    """Numbers of rows, and compiled functions of them."""
    natives = [False, True] if bf16 and llvm.get_host_cpu_features().get("avx512bf16") else [False]
    for rows, wide, native in ((1, True, natives[-1]), (2, False, False), (6, True, natives[-1])):
        multiply = block_product(rows, bf16, native, wide)

        def product(weights: int, places: int, sums: int, multiply: Any = multiply) -> None:
            multiply(weights, places, WORDS, sums)

        yield rows, inlined(product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_sums_have_the_same_bits_in_each_variant(dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(0)
    inputs = WORDS * 4 // dtype.itemsize
    x_RI = torch.randn(ROWS, inputs, generator=numbers).to(dtype)
    weights_OI = torch.randn(COLUMNS, inputs, generator=numbers).to(dtype)
    weights_IO = weights_OI.view(torch.int32).T.contiguous()
    places = np.array([row.data_ptr() for row in x_RI], np.int64)
    found = []
    for rows, product in variants(dtype == torch.bfloat16):
        sums_RO = torch.full((rows, COLUMNS), torch.nan)
        product(weights_IO.data_ptr(), places.ctypes.data, sums_RO.data_ptr())
        found.append(sums_RO)
    torch.testing.assert_close(found[-1], x_RI.float() @ weights_OI.float().T)
    assert all(torch.equal(each, found[-1][: len(each)]) for each in found)
