"""CUDA's streams, events and page locking over CPU memory, for tests of PinnedBlocks.

A copy is made as late as the events allow: when a step starts that waits for it, or when the host
waits for it. `log` lists the calls in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from baton_engine.kv.pinned_blocks import CudaCalls


@dataclass
class FakeStream:
    cuda: FakeCuda
    name: str

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(f"{self.name} wait")
        self.cuda.awaited = event.copies


@dataclass
class FakeEvent:
    """`copies` were queued before the event was recorded last."""

    cuda: FakeCuda
    copies: int = 0

    def record(self, stream: FakeStream) -> None:
        self.cuda.log.append(f"record on {stream.name}")
        self.copies = len(self.cuda.queue)

    def synchronize(self) -> None:
        self.cuda.log.append("host waits")
        self.cuda.make(self.copies)


class FakeCuda:
    """`code` is CUDA's error code when pages are locked; `locked` has the size of each locked
    range of addresses."""

    def __init__(self, code: int = 0) -> None:
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        self.queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.awaited = 0
        self._made = 0
        self._code = code
        self._using: list[FakeStream] = []
        self.calls = CudaCalls(
            cudart=lambda: self,
            stream=lambda device: FakeStream(self, "copies"),
            event=lambda: FakeEvent(self),
            using=self._use,
            current=lambda device: FakeStream(self, "steps"),
            copy=self._copy,
        )

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self._code:
            self.locked[address] = size
        return self._code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0

    def start_step(self) -> None:
        """A step starts after the copies that its stream waits for."""
        self.log.append("step")
        self.make(self.awaited)

    def make(self, copies: int) -> None:
        for target, source in self.queue[self._made : copies]:
            target.copy_(source)
        self._made = max(self._made, copies)

    @contextmanager
    def _use(self, stream: FakeStream) -> Iterator[None]:
        self._using.append(stream)
        yield
        self._using.pop()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append(f"copy {len(target)} on {self._using[-1].name}")
        self.queue.append((target, source))
