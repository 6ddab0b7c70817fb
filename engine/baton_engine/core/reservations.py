"""Blocks that requests hold before they run, and how a request starts from them.

In: requests whose KV is being fetched, and the runs of spans that have arrived. Out: Reservations,
and leaders that own the reserved blocks, with arrived blocks registered in the prefix cache.

Errors: ValueError for calls that break the contract.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton_engine.core.kv_chunks import register
from baton_engine.interface import Reservation
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.ranges import Run, check_runs, merge_runs, reusable, spans_of, within
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.sequence import Sequence as Choice
from baton_engine.scheduling.sequence import blocks_for, drop_windowed, given_ids
from baton_protocol.ids import BlockHash, BlockId, RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.request import Request


class Landed(NamedTuple):
    """Runs of spans whose verified KV has arrived: in the groups without a window, and in those
    with one (see EngineCore.submit)."""

    full: Sequence[Run]
    windowed: Sequence[Run]


NOTHING = Landed((), ())


class Reservations:
    """At most one reservation per request, held until it is used or released."""

    def __init__(self, pool: BlockPool, scheduler: Scheduler, layout: KVLayout) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._layout = layout
        self._held: dict[RequestId, Reservation] = {}

    def reserve(self, request: Request, hashes: tuple[BlockHash, ...]) -> Reservation | None:
        """See EngineCore.reserve. `hashes` name the full blocks of the request's known tokens."""
        if request.id in self._held:
            raise ValueError(f"request {request.id} has a reservation already")
        findable = () if request.params.reads_no_cache else hashes
        known, size = len(given_ids(request)), self._layout.block_size
        if self._layout.window is not None:
            # The last token, if it is computed again, sees earlier spans than the next one does.
            findable = findable[: (known - 1) // size]
        # A request submitted with all its tokens may know one token more than the pool holds.
        # The last token needs no KV, so the whole pool is enough.
        if self._scheduler.owes_blocks:
            return None
        spans = min(blocks_for(known, size), self._pool.num_blocks // self._layout.num_groups)
        taken = self._pool.take(spans, findable, spare=self._scheduler.spare)
        if taken is None:
            self._scheduler.pins.make_room(spans, findable)
            taken = self._pool.take(spans, findable, spare=self._scheduler.spare)
        if taken is None:
            return None
        self._pool.host.settle()  # from now on transfers may write into the blocks
        cached = taken.cached + taken.loaded
        reservation = Reservation(request.id, tuple(taken.blocks), hashes, cached, taken.loaded)
        self._held[request.id] = reservation
        return reservation

    def release(self, reservation: Reservation) -> None:
        """Release the reservation's blocks. Idempotent."""
        if self._held.get(reservation.request) is reservation:
            del self._held[reservation.request]
            self._pool.release([id for id in reservation.blocks if id])

    def check(self, request: RequestId, reservation: Reservation, landed: Landed) -> None:
        """Raise ValueError unless the request owns the reservation and the runs are ascending runs
        of its full spans."""
        if self._held.get(request) is not reservation:
            raise ValueError(f"request {request} does not own this reservation")
        for runs in landed:
            check_runs(runs, len(reservation.hashes))

    def use(self, leader: Choice, reservation: Reservation, landed: Landed) -> None:
        """Give the reserved blocks to the leader. Register the blocks that landed, release those
        that it does not need, and leave at least one token to compute."""
        del self._held[reservation.request]
        layout, size, cached = self._layout, self._layout.block_size, reservation.cached
        blocks, computable = list(reservation.blocks), leader.known - 1
        # The block of the last known token is not registered, because a step will write it.
        whole = computable // size
        if cached > whole:
            # All known tokens are cached. Other requests may read the last blocks, so they are
            # never written again: release them and recompute their tokens in new ones.
            self._pool.release(blocks[whole * layout.num_groups :])
            del blocks[whole * layout.num_groups :]
            computable = whole * size
        ready = merge_runs([(0, cached), *landed.full])
        if layout.window is not None:
            # Of the cached spans, the blocks that are missing are not seen from `cached` on.
            windowed = merge_runs([(0, cached), *within(landed.windowed, cached, whole + 1)])
            ready = reusable(ready, windowed, computable, layout)
            unseen = spans_of(ready) - spans_of(windowed)
            self._pool.release(drop_windowed(blocks, sorted(unseen), layout))
        for run in within(ready, cached, whole):
            register(self._pool, blocks, reservation.hashes, run, layout)
        runs = within([(start * size, end * size) for start, end in ready], 0, computable)
        leader.set_blocks(blocks, runs)
        self._pool.release(leader.drop_window_blocks())
        own, shared = (cached - reservation.loaded) * size, min(cached * size, computable)
        leader.state.record_sources(
            leader,
            cached=within([(0, own)], 0, shared),
            host=within([(own, shared)], 0, shared),
            fetched=within(runs, shared, computable),
        )

    def blocks(self) -> Iterator[BlockId]:
        """Reserved blocks, once per reference."""
        for reservation in self._held.values():
            yield from (id for id in reservation.blocks if id)
