"""The host tier's memory for a pool on CUDA: page-locked, and copied on a stream of its own.

In: blocks and slots. Out: asynchronous copies between them, and their order with the steps.

The memory has exactly the size asked for: it is mapped, then registered with CUDA. torch's pinned
memory would be rounded up to a power of two, 32 GiB for a tier of 20 GiB.

Shapes: P blocks of the pool, N slots, Z bytes of a block.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from baton_engine.kv.host_blocks import no_memory
from baton_engine.kv.kv_pool import TorchMemory
from baton_protocol.ids import BlockId

# Private pages, all allocated at once: a shared mapping would count as shared memory.
MAPPING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
REGISTER_DEFAULT = 0


class Cudart(Protocol):
    """The functions of torch.cuda.cudart() that lock pages. They return CUDA's error code."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Any: ...

    def cudaHostUnregister(self, address: int) -> Any: ...


class Event(Protocol):
    """The methods of torch.cuda.Event that order copies and steps."""

    def record(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


def copy_async(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class CudaCalls(NamedTuple):
    """The parts of torch.cuda that PinnedBlocks uses. `current` returns the stream of the steps."""

    cudart: Callable[[], Cudart] = torch.cuda.cudart
    stream: Callable[[torch.device], Any] = torch.cuda.Stream
    event: Callable[[], Event] = torch.cuda.Event
    using: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream
    current: Callable[[torch.device], Any] = torch.cuda.current_stream
    copy: Callable[[torch.Tensor, torch.Tensor], None] = copy_async


TORCH_CUDA = CudaCalls()


class PinnedBlocks:
    """HostMemory for a pool on CUDA. The order of copies and steps:

    - A copy waits for no step. No step in flight uses its blocks (see HostMemory), and content that
      is saved was computed by steps that have been read, or came by an earlier copy.
    - Copies run one after the other, on one stream. So a load of a slot comes after its save, and a
      load into a block after the save of its old content.
    - Each save() and load() records an event after its copies, and the steps' stream waits for it.
      So a later step writes a block after its save, and reads a block after its load.
    - settle() waits on the host for that event: transfers use blocks on streams of their own.

    The copies of a step run beside the step in flight before it. 128 blocks of 1.8 MB take 4 ms on
    a bus of 55 GB/s, which the next step would wait for if they ran on its stream. That step waits
    for all of them, although it may use only some of the blocks: one event is enough, because few
    copies are for later steps (those for the rest of a prompt longer than a step).
    """

    def __init__(self, memory: TorchMemory, num_slots: int, cuda: CudaCalls = TORCH_CUDA) -> None:
        """Raises SettingsError if the memory cannot be allocated or locked."""
        pool, size = memory.pool, memory.layout.block_bytes
        self.num_slots = num_slots
        self.slot_bytes = size
        self._cuda = cuda
        self._device = pool.device
        self._blocks_PZ = pool
        try:
            pages = torch.frombuffer(mmap.mmap(-1, num_slots * size, MAPPING), dtype=torch.uint8)
        except (OSError, OverflowError) as error:
            raise no_memory(num_slots, size) from error
        cudart = cuda.cudart()
        code = int(cudart.cudaHostRegister(pages.data_ptr(), pages.nbytes, REGISTER_DEFAULT))
        if code:
            raise no_memory(num_slots, size, f"cudaHostRegister fails with CUDA error {code}")
        self._slots_NZ = pages.view(num_slots, size)
        self._stream = cuda.stream(self._device)
        self._copied = cuda.event()
        self._unsettled = False
        # At the end of the process the kernel unlocks the pages.
        weakref.finalize(self, _unlock, cudart, pages, self._copied).atexit = False

    def save(self, blocks: Sequence[BlockId], slots: Sequence[int]) -> None:
        self._copy(self._slots_NZ, slots, self._blocks_PZ, blocks)

    def load(self, slots: Sequence[int], blocks: Sequence[BlockId]) -> None:
        self._copy(self._blocks_PZ, blocks, self._slots_NZ, slots)

    def settle(self) -> None:
        if self._unsettled:
            self._copied.synchronize()
            self._unsettled = False

    def _copy(
        self,
        into: torch.Tensor,
        targets: Sequence[int],
        origin: torch.Tensor,
        sources: Sequence[int],
    ) -> None:
        """Copy rows, and make later steps wait for them."""
        self._unsettled = True
        with self._cuda.using(self._stream):
            for target, source, count in contiguous_runs(targets, sources):
                self._cuda.copy(into[target : target + count], origin[source : source + count])
        self._copied.record(self._stream)
        self._cuda.current(self._device).wait_event(self._copied)


def contiguous_runs(
    targets: Sequence[int], sources: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """The pairs in order, as (target, source, count): runs in which both ascend by one. Each run is
    one copy: a copy costs the host some 5 us."""
    first = 0
    for index in range(1, len(targets) + 1):
        ahead = index - first
        if (
            index == len(targets)
            or targets[index] != targets[first] + ahead
            or sources[index] != sources[first] + ahead
        ):
            yield targets[first], sources[first], ahead
            first = index


def _unlock(cudart: Cudart, pages: torch.Tensor, copied: Event) -> None:
    """Unlock the pages after the last copy. They are mapped as long as `pages` lives."""
    copied.synchronize()
    cudart.cudaHostUnregister(pages.data_ptr())
