"""activation(gate) * up in one kernel, against torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton_engine.build import ops_for
from baton_engine.layers.ops import TORCH_OPS, Ops
from baton_engine.layers.triton_activation import BLOCK
from tests.support.engines.kernels import DEVICE, DTYPES, assert_close, can_compute, noise, poisoned

OPS = ops_for("triton")
Activation = Callable[[Ops, torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": lambda ops, gate_up: ops.silu_mul(gate_up),
    "gelu": lambda ops, gate_up: ops.gelu_tanh_mul(gate_up),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (18, 96), (3, BLOCK), (2, BLOCK + 476)])
def test_the_product_equals_that_of_torch(
    shape: tuple[int, int], dtype: torch.dtype, name: str
) -> None:
    can_compute(dtype)
    tokens, size = shape
    gate_up = noise(tokens, 2 * size, dtype=dtype) * 4
    with poisoned():
        actual = ACTIVATIONS[name](OPS, gate_up)
    assert_close(actual, ACTIVATIONS[name](TORCH_OPS, gate_up.clone()))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_gate_of_any_size_gives_a_finite_product(name: str) -> None:
    gate = torch.tensor([[-3e38, -1e4, -90.0, 0.0, 90.0, 1e4]], device=DEVICE)
    actual = ACTIVATIONS[name](OPS, torch.cat([gate, torch.ones_like(gate)], dim=1))
    assert actual[0].tolist() == pytest.approx([0.0, 0.0, 0.0, 0.0, 90.0, 1e4], abs=1e-30)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_memory_after_the_rows_is_not_read(name: str) -> None:
    buffer = noise(3, 20)
    buffer[2] = torch.nan
    assert bool(ACTIVATIONS[name](OPS, buffer[:2]).isfinite().all())
