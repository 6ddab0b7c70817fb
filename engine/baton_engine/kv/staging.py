"""Copies of small arrays from the host to the device of a step.

In: arrays of the host. Out: tensors on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def stage(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """A host array on the device. On CUDA through pinned memory, so that the copy overlaps; the
    caching host allocator keeps the staging alive until the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
