"""A step's buffer on the device, and the host buffers from which it is filled."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

STAGING_BUFFERS = 2


class Copied(Protocol):
    """The methods of torch.cuda.Event that Staging uses to wait for a copy."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Staging:
    """A device buffer with a fixed address, and the host buffers it is filled from.

    The host buffers `hosts` are used in turn, each after its last copy is done. Without `hosts`
    (on a CPU) the host writes the buffer itself.
    """

    def __init__(
        self, size: int, device: torch.device, hosts: Sequence[tuple[torch.Tensor, Copied]] = ()
    ) -> None:
        """`size` in int32."""
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._hosts = deque(hosts)

    def next(self) -> npt.NDArray[np.int32]:
        """The next host buffer to write. It still has the content of an earlier step."""
        if not self._hosts:
            return self.buffer.numpy()
        self._hosts.rotate()
        host, copied = self._hosts[0]
        copied.synchronize()
        return host.numpy()

    def send(self, size: int) -> None:
        """Copy the first `size` numbers of the current host buffer to the device, on the step's
        stream."""
        if self._hosts:
            host, copied = self._hosts[0]
            self.buffer[:size].copy_(host[:size], non_blocking=True)
            copied.record()


def staging_for(size: int, device: torch.device) -> Staging:
    """A Staging of `size` int32. On CUDA it has several pinned host buffers, because a copy may not
    have started when the host writes the next step's inputs."""
    if device.type == "cpu":
        return Staging(size, device)
    hosts = [
        (torch.zeros(size, dtype=torch.int32, pin_memory=True), torch.cuda.Event())  # type: ignore[no-untyped-call]
        for _ in range(STAGING_BUFFERS)
    ]
    return Staging(size, device, hosts)
