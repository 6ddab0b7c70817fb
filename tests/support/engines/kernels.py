"""The device and the tolerances of kernel tests, and a count of launches.

On a machine with a GPU, kernels run there, also in bfloat16. Elsewhere they run in triton's
interpreter, which computes bfloat16 wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.needs import NEEDS, needs

DEVICE = torch.device("cuda" if NEEDS["gpu"].present() else "cpu")
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
# A kernel rounds once, torch after each operation: they differ by a few units in the last place.
ROUNDING = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def can_compute(dtype: torch.dtype) -> None:
    """Skip the calling test if kernels cannot compute `dtype` on this machine."""
    if dtype == torch.bfloat16:
        needs("gpu")


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normally distributed values on DEVICE, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare within the rounding tolerance of `actual`'s dtype."""
    rounding = ROUNDING[actual.dtype]
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=rounding, atol=rounding, check_device=False
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Make torch fill uninitialized allocations with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class CountedLaunches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that launch a kernel on a GPU: all but those that return views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if not func.is_view:
            self.names.append(func.__name__)
        return func(*args, **kwargs or {})
