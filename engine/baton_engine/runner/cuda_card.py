"""A GPU's memory, in bytes."""

from __future__ import annotations

import torch


class CudaCard:
    """What torch has reserved, not only allocated, counts: nothing else can use its fragments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def release(self) -> None:
        """Return what torch does not need to the driver, and start a new peak."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        """The most that was reserved since release()."""
        return torch.cuda.max_memory_reserved(self._device)

    def free(self) -> int:
        """Bytes that no process uses."""
        return torch.cuda.mem_get_info(self._device)[0]
