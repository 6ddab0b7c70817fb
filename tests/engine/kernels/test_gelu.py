"""gelu(gate) * up in one kernel, against torch."""

from __future__ import annotations

import pytest
import torch

from baton_engine.layers.ops import TORCH_OPS
from baton_engine.layers.triton_gelu import BLOCK, gelu_tanh_mul
from tests.support.engines.kernels import DEVICE, DTYPES, assert_close, can_compute, noise, poisoned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (18, 96), (3, BLOCK), (2, BLOCK + 476)])
def test_the_product_equals_that_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    can_compute(dtype)
    tokens, size = shape
    gate_up = noise(tokens, 2 * size, dtype=dtype) * 4
    with poisoned():
        actual = gelu_tanh_mul(gate_up)
    assert_close(actual, TORCH_OPS.gelu_tanh_mul(gate_up.clone()))


def test_a_gate_of_any_size_gives_a_finite_product() -> None:
    gate = torch.tensor([[-3e38, -1e4, -90.0, 0.0, 90.0, 1e4]], device=DEVICE)
    actual = gelu_tanh_mul(torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert actual[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, 90.0, 1e4], abs=1e-30)


def test_memory_after_the_rows_is_not_read() -> None:
    buffer = noise(3, 20)
    buffer[2] = torch.nan
    assert bool(gelu_tanh_mul(buffer[:2]).isfinite().all())
