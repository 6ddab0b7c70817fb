"""Where kernels are tested, and by how much they may be off.

On a machine with a GPU they run there, in bfloat16 as well; elsewhere in triton's interpreter,
which computes bfloat16 wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support.needs import NEEDS, needs

DEVICE = torch.device("cuda" if NEEDS["gpu"].present() else "cpu")
DTYPES = [
    torch.float32,
    torch.float16,
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
# A kernel rounds once where torch rounds after each operation: a few units of the last place.
ROUNDING = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def can_compute(dtype: torch.dtype) -> None:
    """Skip the calling test where kernels cannot compute this."""
    if dtype == torch.bfloat16:
        needs("gpu")


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normally distributed, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what the dtype of `found` rounds."""
    rounding = ROUNDING[found.dtype]
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=rounding, atol=rounding, check_device=False
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """What torch allocates without filling it holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
