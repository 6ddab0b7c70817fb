"""The data plane: chunks in and out of the data instances, beside the memory they live in.

    plane = DataPlane(urls, layout, fingerprint, epoch)
    plane.start()
    plane.submit_put(hash, tokens, depth, fill, copied, done)
    plane.submit_get(hash, marker, depth, sink, done)
    plane.close()

Nothing here blocks the caller: submit_* queues, transfer threads (blocking sockets, their own
connection each) do the rest and call back. Callbacks run in a transfer thread, must be short, and
each operation settles exactly once: `done` always comes, after `copied` for a put. A chunk goes to
the instance that rendezvous hashing gives among those that take puts; it is read where its marker
says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import xxhash

from baton_kvstore.endpoint import parse_endpoint
from baton_kvstore.errors import StoreMisconfigured
from baton_kvstore.instance import CLOSED, Instance, Shared, Tuning
from baton_kvstore.operations import MISSING, Format, Get, GetResult, Put, PutResult
from baton_kvstore.rate import RateMeter
from baton_kvstore.staging import StagingPool
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.store import Marker

DEFAULT_THREADS = 2
DEFAULT_INFLIGHT_BYTES = 64 << 20
TERMINATOR_BYTES = 2  # a value's end is received behind it


def rendezvous(chunk: BlockHash, labels: Sequence[str]) -> int:
    """Index of the instance a chunk is written to: the highest of one digest per instance.

    Another instance takes 1/(N+1) of the chunks from all others alike and moves no other.
    """
    weights = [xxhash.xxh3_64_intdigest(chunk + label.encode()) for label in labels]
    return max(range(len(weights)), key=weights.__getitem__)


class DataPlane:
    """All data instances of one node. Make, start() and close() it in one thread; submit from any.

    Raise StoreMisconfigured for a bad URL or a layout this version cannot move. A server that is
    down is no error here: its operations settle with a reason, and it is probed until it is back.
    """

    def __init__(
        self,
        urls: Sequence[str],
        layout: KVLayout,
        fingerprint: Fingerprint,
        epoch: Epoch,
        *,
        threads_per_instance: int = DEFAULT_THREADS,
        max_inflight_bytes: int = DEFAULT_INFLIGHT_BYTES,
        tuning: Tuning | None = None,
    ) -> None:
        if not urls:
            raise StoreMisconfigured("no data URL; give at least one")
        if layout.kv_shards != 1:
            raise StoreMisconfigured(f"kv_shards is {layout.kv_shards}; only 1 can be moved yet")
        tuning = tuning or Tuning()
        self._format = Format(layout, fingerprint, epoch, tuning.ttl_base_s)
        size = self._format.value_bytes
        self._staging = StagingPool(size + TERMINATOR_BYTES, max(1, max_inflight_bytes // size))
        self._puts, self._gets = RateMeter(), RateMeter()
        shared = Shared(self._staging, fingerprint, size, self._puts, self._gets, tuning)
        self._instances = [
            Instance(number, parse_endpoint(url), threads_per_instance, shared)
            for number, url in enumerate(urls)
        ]
        self._labels = [instance.label for instance in self._instances]

    def start(self) -> None:
        """Start the transfer threads; they connect at once."""
        for instance in self._instances:
            instance.start()

    def close(self) -> None:
        """Settle everything outstanding with reason "closed" and join the threads."""
        for instance in self._instances:
            instance.stop()
        self._staging.close()
        for instance in self._instances:
            instance.join()

    def submit_put(
        self,
        chunk: BlockHash,
        tokens: int,
        depth: int,
        fill: Callable[[memoryview], None],
        copied: Callable[[], None],
        done: Callable[[PutResult], None],
    ) -> None:
        """Store a chunk. `fill` writes `layout.chunk_bytes` bytes into the view it is given;
        `copied` says that the source is free; `done` brings the marker to write on the index.
        `depth` is the chunk's index in its chain."""
        operation = Put(self._format, chunk, tokens, depth, fill, copied, done)
        self._instances[self.instance_for(chunk)].submit(operation)

    def submit_get(
        self,
        chunk: BlockHash,
        marker: Marker,
        depth: int,
        sink: Callable[[memoryview], None],
        done: Callable[[GetResult], None],
    ) -> None:
        """Fetch a chunk. `sink` is called with the verified payload, and only then; the view is
        dead when it returns. A marker that cannot be true settles at once, in this thread."""
        operation = Get(self._format, chunk, marker, depth, sink, done)
        layout = self._format.layout
        wrong = ""
        if not 0 <= marker.instance < len(self._instances):
            wrong = f"{MISSING}: no data instance {marker.instance} among {len(self._instances)}"
        elif (marker.payload_bytes, marker.shards) != (layout.chunk_bytes, layout.kv_shards):
            wrong = f"{MISSING}: {marker.payload_bytes} bytes in {marker.shards} shards stored"
        if wrong:
            operation.settle(operation.lost(wrong), 0.0)
            return
        self._instances[marker.instance].submit(operation)

    def instance_for(self, chunk: BlockHash) -> int:
        """Where a chunk is written now (see `rendezvous`): readers ask its marker."""
        everyone = range(len(self._instances))
        usable = [number for number in everyone if not self._instances[number].put_trouble]
        numbers = usable or everyone
        return numbers[rendezvous(chunk, [self._labels[number] for number in numbers])]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Per instance the run id last seen, "" before the first connection."""
        return tuple(instance.run_id for instance in self._instances)

    @property
    def troubles(self) -> tuple[str, ...]:
        """Per instance why it is refused now, "" if it is not."""
        return tuple(instance.trouble for instance in self._instances)

    @property
    def put_troubles(self) -> tuple[str, ...]:
        """Per instance why it takes no puts now, "" if it does."""
        return tuple(instance.put_trouble for instance in self._instances)

    @property
    def queued(self) -> int:
        """Operations accepted and not yet begun."""
        return sum(instance.queued for instance in self._instances)

    @property
    def put_bytes_per_s(self) -> float:
        """Moving average while puts ran, all threads together; 0.0 until measured."""
        return self._puts.bytes_per_s

    @property
    def get_bytes_per_s(self) -> float:
        return self._gets.bytes_per_s

    def wait_connected(self, timeout_s: float) -> bool:
        """Block until every instance was reached once; False on timeout. For start-up only."""
        until = time.monotonic() + timeout_s
        while not all(self.run_ids):
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True


__all__ = ["CLOSED", "DataPlane", "GetResult", "PutResult", "Tuning", "rendezvous"]
