"""Measures how fast this machine reads memory and multiplies, for a bench's roofline.

In: a device and a dtype. Out: a Machine. It takes about a second and 256 MiB of the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from baton_engine.memory.roofline import Machine

READ_BYTES = 256 << 20  # more than the caches of most machines
SIDE = {"cpu": 1024, "cuda": 4096}  # of the square matrices that are multiplied
PASSES = 7


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine | None:
    """The speeds of this device with torch's current number of threads; None if the device has no
    memory left for the measurement."""
    try:
        return Machine(_read_speed(device), _product_speed(device, dtype))
    except (torch.OutOfMemoryError, MemoryError):
        return None


def _read_speed(device: torch.device) -> float:
    """Bytes per second that a sum reads."""
    numbers = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    return READ_BYTES / _least_seconds(device, lambda: numbers.sum())


def _product_speed(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a product of two square matrices."""
    side = SIDE[device.type]
    left, right = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return 2 * side**3 / _least_seconds(device, lambda: left @ right)


def _least_seconds(device: torch.device, act: Callable[[], object]) -> float:
    times = []
    for _ in range(PASSES):
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
