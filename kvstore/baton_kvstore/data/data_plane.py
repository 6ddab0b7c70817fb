"""The data plane: puts and gets of chunks, in the process that owns the cache's memory.

    plane = DataPlane(urls, layout, fingerprint, epoch)
    plane.start()
    plane.submit_put(hash, tokens, depth, fill, copied, done, priority, direct)
    plane.submit_get(hash, marker, depth, sink, done, priority, direct)
    plane.close()

submit_put and submit_get do not block: they queue an operation. Transfer threads, each with its own
blocking socket, run the operations and call back. Callbacks run in a transfer thread and must be
short. Each operation settles exactly once: `done` is always called, for a put after `copied`. It
takes at most the longest wait in the queue, the probe that its thread may then be running, its own
transfer (see `Tuning`) and the callbacks. A put writes all head shards of a chunk to the instance
that rendezvous hashing selects among those that accept puts. A get reads from the instance that the
marker names.

Copying costs throughput. So a payload that a socket can reach is not copied: `direct` lists its
memory pieces, in order. A payload elsewhere (on a device, or split in head shards) goes through
staging buffers, with `fill` and `sink`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.data.instance import Instance
from baton_kvstore.data.rate_meter import RateMeter
from baton_kvstore.data.rendezvous import rendezvous
from baton_kvstore.data.shared import Shared
from baton_kvstore.data.staging_pool import StagingPool
from baton_kvstore.data.transfers import (
    MISSING,
    Format,
    Get,
    GetResult,
    Pieces,
    Put,
    PutResult,
)
from baton_kvstore.data.tuning import Tuning
from baton_kvstore.data.write_behind_budget import WriteBehindBudget
from baton_kvstore.errors import StoreMisconfigured
from baton_protocol.ids import BlockHash, Epoch, Fingerprint
from baton_protocol.layout import KVLayout
from baton_protocol.policies import StoreCare
from baton_protocol.store import DataInstance, Marker, Priority


class DataPlane:
    """All data instances of one node. Create, start() and close() it in one thread; submit from
    any.

    The constructor raises StoreMisconfigured for an invalid URL or layout. A server that is down is
    not an error: its operations settle with a reason, and it is probed until it is back.

    `write_behind_bandwidth` is in bytes per second; None means a share of the measured put rate, 0
    turns write-behind off. `settings` is the mode in which a server's settings are applied or
    checked when a connection meets a new start of it; None leaves them alone.
    """

    def __init__(
        self,
        urls: Sequence[str],
        layout: KVLayout,
        fingerprint: Fingerprint,
        epoch: Epoch,
        *,
        write_behind_bandwidth: float | None = None,
        settings: StoreCare | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        if not urls:
            raise StoreMisconfigured("no data URL; give at least one")
        shards, undivided = layout.kv_shards, layout.undivided
        if undivided is not None:
            raise StoreMisconfigured(
                f"kv_shards is {shards}; give a divisor of the {undivided.heads} KV heads"
            )
        tuning = tuning or Tuning()
        self._format = Format(layout, fingerprint, epoch, tuning.ttl_base_s)
        size = self._format.value_bytes(layout.chunk_bytes)
        self._staging = StagingPool(size, max(1, tuning.max_inflight_bytes // size))
        self._puts, self._gets = RateMeter(), RateMeter()
        shared = Shared(
            staging=self._staging,
            fingerprint=fingerprint,
            value_bytes=size,
            shards=shards,
            puts=self._puts,
            gets=self._gets,
            tuning=tuning,
            settings=settings,
        )
        self._instances = [
            Instance(number, parse_endpoint(url), tuning.threads_per_instance, shared)
            for number, url in enumerate(urls)
        ]
        self._labels = [instance.label for instance in self._instances]
        self._behind = WriteBehindBudget(write_behind_bandwidth)
        self.draining = False  # while True, write-behind has no limit

    def start(self) -> None:
        """Start the transfer threads, which connect at once."""
        for instance in self._instances:
            instance.start()

    def close(self) -> None:
        """Settle all pending operations with reason "closed" and join the threads."""
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
        fill: Callable[[memoryview, int], None],
        copied: Callable[[], None],
        done: Callable[[PutResult], None],
        priority: Priority = Priority.PREFIX,
        direct: Sequence[memoryview] | None = None,
        payload_bytes: int | None = None,
        kept_until: int = 0,
    ) -> None:
        """Store a chunk of `tokens` tokens. `depth` is the chunk's index in its chain.

        The chunk has `payload_bytes`: `layout.chunk_bytes` (None), or `layout.full_groups_bytes`
        for only the blocks of the groups without a window. It replaces a value of another size.
        `fill(view, shard)` must write the bytes of one head shard. `copied` is called when the
        source is free. `done` gets the marker to write on the index; all shards are then
        acknowledged. With `kept_until`, in Unix seconds, the chunk lives at least until then.

        With `direct` the payload is read from these pieces instead, again if it is sent again. They
        must not change before `copied`, which is then called when the put has settled. Raise
        ValueError if `payload_bytes` or the sizes of `direct` do not fit the layout.
        """
        size = self._format.layout.chunk_bytes if payload_bytes is None else payload_bytes
        if size not in self._format.payload_sizes:
            raise ValueError(f"payload_bytes is {size}, not in {set(self._format.payload_sizes)}")
        self._check(direct, size)
        operation = Put(
            *(self._format, chunk, tokens, depth, fill, copied, done, priority, direct, size),
            kept_until=kept_until,
        )
        self._instances[self.instance_for(chunk)].submit(operation)

    def submit_get(
        self,
        chunk: BlockHash,
        marker: Marker,
        depth: int,
        sink: Callable[[memoryview, int], None],
        done: Callable[[GetResult], None],
        priority: Priority = Priority.PREFIX,
        direct: Pieces | None = None,
    ) -> None:
        """Fetch a chunk of `marker.payload_bytes` bytes. `depth` is the chunk's index in its chain.

        `sink(view, shard)` gets the verified payload of each head shard; the view is invalid when
        it returns. After a lost shard no further shard follows, so use the data only if the result
        is ok. An impossible marker settles the operation at once, in the calling thread.

        With `direct` the payload is received into these pieces instead, before it is verified: they
        hold undefined bytes until `done`, and after it unless the result is ok. A piece of None
        skips that block of the payload; all pieces have the same size. Raise ValueError if the
        sizes of `direct` do not fit the layout.
        """
        operation = Get(self._format, chunk, marker, depth, sink, done, priority, direct)
        layout = self._format.layout
        wrong = ""
        if not 0 <= marker.instance < len(self._instances):
            wrong = f"{MISSING}: no data instance {marker.instance} among {len(self._instances)}"
        elif marker.payload_bytes not in self._format.payload_sizes or (
            marker.shards != layout.kv_shards
        ):
            wrong = (
                f"{MISSING}: the store has {marker.payload_bytes} bytes in {marker.shards} shards"
            )
        if wrong:
            operation.settle(operation.lose_marker(wrong), 0.0)
            return
        self._check(direct, marker.payload_bytes)
        self._instances[marker.instance].submit(operation)

    def _check(self, direct: Pieces | None, payload_bytes: int) -> None:
        """Raise ValueError for wrong sizes, which would otherwise look like a corrupt value."""
        if direct is None:
            return
        shards = self._format.layout.kv_shards
        share = payload_bytes // max(1, len(direct))
        sizes = [share if piece is None else len(piece) for piece in direct]
        if shards != 1 or sum(sizes) != payload_bytes or len(set(sizes)) != 1:
            raise ValueError(
                f"direct has pieces of {sizes} bytes and kv_shards is {shards}; give pieces of "
                f"equal size, {payload_bytes} bytes in total, and only if kv_shards is 1"
            )

    def instance_for(self, chunk: BlockHash) -> int:
        """Return the instance that a chunk is put on now (see `rendezvous`). Readers use the
        instance in the chunk's marker."""
        all_numbers = range(len(self._instances))
        usable = [number for number in all_numbers if not self._instances[number].put_trouble]
        numbers = usable or all_numbers
        return numbers[rendezvous(chunk, [self._labels[number] for number in numbers])]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """The run id of each instance as last seen, "" before the first connection."""
        return tuple(instance.run_id for instance in self._instances)

    @property
    def troubles(self) -> tuple[str, ...]:
        """For each instance why operations are refused now, "" if they are not."""
        return tuple(instance.trouble for instance in self._instances)

    @property
    def put_troubles(self) -> tuple[str, ...]:
        """For each instance why puts are refused now, "" if they are not."""
        return tuple(instance.put_trouble for instance in self._instances)

    def instances(self) -> tuple[DataInstance, ...]:
        """The servers' figures as last measured, in the order of their URLs. Does no I/O."""
        return tuple(instance.now for instance in self._instances)

    def take_behind(self, size: int) -> bool:
        """Return whether write-behind may put `size` bytes now; True counts them as written.

        Only the thread that submits write-behind puts may call this.
        """
        if self.draining:
            return True
        instances = self.instances()
        bounded = [instance for instance in instances if instance.limit_bytes]
        return self._behind.take(
            size,
            put_bytes_per_s=self.put_bytes_per_s,
            fullest=max(
                (instance.used_bytes / instance.limit_bytes for instance in bounded), default=0.0
            ),
            others=any(instance.put_trouble for instance in instances)
            or any(instance.puts_wait for instance in self._instances),
        )

    @property
    def queued(self) -> int:
        """Number of operations in all queues."""
        return sum(instance.queued for instance in self._instances)

    @property
    def put_bytes_per_s(self) -> float:
        """Moving average of the rate of all threads together while puts run; 0.0 until measured."""
        return self._puts.bytes_per_s

    @property
    def get_bytes_per_s(self) -> float:
        return self._gets.bytes_per_s

    def wait_connected(self, timeout_s: float) -> bool:
        """Block until every instance was reached once; return False on timeout. For start-up
        only."""
        until = time.monotonic() + timeout_s
        while not all(self.run_ids):
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True
