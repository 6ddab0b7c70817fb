"""Copy small arrays from the host to the step's device.

In: numpy arrays. Out: tensors on the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def stage(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return `array` as a tensor on `device`, same shape and dtype. On CUDA the copy goes through
    pinned memory and is asynchronous; torch's caching host allocator keeps the pinned buffer alive
    until the copy is done. On a CPU the tensor shares the array's memory if it is contiguous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
