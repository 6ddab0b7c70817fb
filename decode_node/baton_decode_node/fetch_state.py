"""How a request closes its gap from the store before it runs: one pure state machine.

A parked request costs the running batch nothing. It learns which of its prompt's full chunks exist
(announced by its prefill partner, or found by a lookup and worth it), takes blocks for its whole
prompt when the first of them can be fetched, fetches, and is admitted with the chunks it then has,
holes between them or not: the engine computes the holes. The same machine serves a hand-off
(`await_first`), a whole request and a prefill job.

In: what happens, in any order, one method each. Out: the next state, and what the step loop does
now.

What holds whatever the order (tests/decode_node/test_fetch_state.py):
  - no fetch without blocks; blocks are released, and handed to the engine, only when no fetch is in
    flight into them, also on abort and timeout;
  - an admission names landed chunks and no others, and comes at most once; after it, and after
    `forget`, comes nothing;
  - a lost chunk is a hole and no more: what lies behind it is fetched and used. Announced anew, it
    is fetched again. Nobody waits for it.

Sets of chunks are bit sets in ints: immutable, and 8,192 chunks are 1 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from baton_node.engine.chunk_bits import chunks_of, first_chunks, runs_of

# Fetches of one request in flight: enough to fill the transfer threads, few enough that an abort
# settles soon and that requests share the link.
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Admission:
    """Run the request. `chunks` fetched chunks have landed; `runs` are where: [start, end) in
    blocks behind the cached ones, ascending and apart."""

    runs: tuple[tuple[int, int], ...] = ()
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class FetchActions:
    """What the step loop does now, in the order of the fields."""

    release: bool = False  # give the reservation back; nothing is in flight into it
    fetch: tuple[int, ...] = ()  # chunks, ascending
    admit: Admission | None = None
    forget: bool = False  # the request is gone


Outcome = tuple["FetchState", FetchActions]
NOTHING = FetchActions()


@dataclass(frozen=True, slots=True)
class FetchState:
    """One request's state. `cached_blocks`, the leading ones that this node's cache holds, is a
    hint until the reservation says it for sure."""

    chunks: int  # full chunks of what it knows
    chunk_blocks: int
    awaits_first: bool = False
    cached_blocks: int = 0
    exists: int = 0
    flying: int = 0
    renewed: int = 0  # announced anew while in flight
    landed: int = 0
    lost: int = 0
    held: bool = False
    ended: bool = False
    expired: bool = False
    returning: bool = False  # asked to give its blocks back
    aborted: bool = False
    over: bool = False  # admitted or forgotten

    @property
    def own(self) -> int:
        """Leading chunks that the own cache holds whole."""
        return min(self.chunks, self.cached_blocks // self.chunk_blocks)

    @property
    def have(self) -> int:
        return first_chunks(self.own) | self.landed

    @property
    def fetchable(self) -> int:
        """Chunks that exist, as far as is known, and are not here."""
        return self.exists & ~self.have & ~self.flying & ~self.lost

    @property
    def wants_blocks(self) -> bool:
        """True when a fetch could start if there were blocks. Grant them in order of arrival."""
        return not (self.held or self.over or self.aborted or self.expired) and self.fetchable != 0

    @property
    def missing(self) -> int:
        """Chunks that may still come: in flight, to be fetched, or not announced yet."""
        coming = self.flying | self.fetchable
        if not self.ended:
            coming |= first_chunks(self.chunks) & ~self.have & ~self.lost
        return coming

    def start(self) -> Outcome:
        """What a new request can do before anything happens."""
        return self._become()

    def announce(self, chunks: int) -> Outcome:
        """These chunks exist (a bit set). A lost chunk announced anew was put again."""
        known = chunks & first_chunks(self.chunks)
        return self._become(
            exists=self.exists | known,
            lost=self.lost & ~known,
            renewed=self.renewed | (known & self.flying),
        )

    def end(self) -> Outcome:
        """No more will be announced: the partner is through or dead, or the lookup was answered."""
        return self._become(ended=True)

    def reserve(self, cached: int) -> Outcome:
        """The request got blocks for all its tokens; the first `cached` hold KV already."""
        return self._become(held=True, cached_blocks=cached)

    def land(self, chunk: int) -> Outcome:
        """A fetch has brought the chunk."""
        bit = self.flying & 1 << chunk
        return self._become(
            flying=self.flying & ~bit, renewed=self.renewed & ~bit, landed=self.landed | bit
        )

    def lose(self, chunk: int) -> Outcome:
        """A fetch has failed. A chunk that was put again meanwhile can be fetched again."""
        bit = self.flying & 1 << chunk
        return self._become(
            flying=self.flying & ~bit,
            renewed=self.renewed & ~bit,
            lost=self.lost | (bit & ~self.renewed),
        )

    def know_first(self) -> Outcome:
        """The router sent FirstTokens or NoFirstTokens for this attempt."""
        return self._become(awaits_first=False)

    def time_out(self) -> Outcome:
        """It waited long enough for chunks. Ignored while FirstTokens is awaited: only the router
        ends that."""
        return self._become(expired=self.expired or not self.awaits_first)

    def give_back(self) -> Outcome:
        """The running batch needs the blocks."""
        return self._become(returning=self.held)

    def abort(self) -> Outcome:
        return self._become(aborted=True)

    def _become(self, **changes: Any) -> Outcome:
        """The state with these changes, and what to do now. What comes too late changes nothing."""
        if self.over:
            return self, NOTHING
        return replace(self, **changes)._advance()

    def _advance(self) -> Outcome:
        if self.aborted:
            if self.flying:
                return self, NOTHING
            gone = replace(self, held=False, over=True)
            return gone, FetchActions(release=self.held, forget=True)
        if self.returning and self.flying:
            return self, NOTHING
        state = self
        fetch: tuple[int, ...] = ()
        if self.returning:
            # The chunks still exist in the store; what had landed here is gone with the blocks.
            state = replace(self, held=False, returning=False, landed=0)
        if state.held and not state.expired:
            fetch = chunks_of(state.fetchable, WINDOW - state.flying.bit_count())
            state = replace(state, flying=state.flying | sum(1 << chunk for chunk in fetch))
        admission = state._admission() if state._may_run() else None
        state = replace(state, over=admission is not None)
        return state, FetchActions(self.returning, fetch, admission)

    def _may_run(self) -> bool:
        if self.awaits_first or self.flying:
            return False
        return self.expired or not self.missing

    def _admission(self) -> Admission:
        """Of a chunk that is partly cached only the rest counts. Without blocks nothing has
        landed."""
        size = self.chunk_blocks
        runs = tuple(
            (max(first * size, self.cached_blocks), (first + count) * size)
            for first, count in runs_of(self.landed)
        )
        return Admission(runs, self.landed.bit_count())
