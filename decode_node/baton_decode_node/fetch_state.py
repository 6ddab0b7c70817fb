"""How a parked request gets its prompt's KV from the store before it runs: a pure state machine.

A parked request costs the running batch nothing. It learns which full chunks of its prompt exist:
its prefill node announces them, or a lookup finds them and fetching them pays. It reserves blocks
for its whole prompt when it can fetch the first chunk, fetches, and is admitted with the chunks
that have landed. There may be holes between them, which the engine computes. The same machine
serves a hand-off (`await_first`), a whole request and a prefill job.

Of layers with a window (see KVLayout) a request needs only the last `window` tokens before those
that it computes. So a chunk there must be stored with the blocks of all groups of layers; of
earlier chunks it needs the groups without a window, or nothing if there are none (`unneeded`). The
state machine learns only of chunks that suffice. A hand-off gets all chunks that it needs, so what
suffices follows from the prompt's length. What a lookup finds may be less: see `fetch_decision`.

It has one method per event, and events may come in any order. Each method returns the next state
and the actions for the step loop.

Invariants for every order of events (tests/decode_node/test_fetch_state.py):
  - A fetch needs reserved blocks. Blocks are released or handed to the engine only when no fetch
    into them is in flight, also on abort and timeout.
  - An admission names exactly the landed and the unneeded chunks, and there is at most one. After
    it, and after `forget`, there are no actions.
  - A lost chunk leaves only a hole: chunks after it are still fetched and used. No request waits
    for a lost chunk. If it is announced again, it is fetched again.

Sets of chunks are bit sets (see `baton_node.engine.chunk_sets`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from baton_node.engine.chunk_sets import chunks_of, first_chunks, runs_of

# Most fetches of one request in flight: enough to keep the transfer threads busy, and few enough
# that an aborted request settles soon and that requests share the link.
WINDOW = 16
FetchTransition: TypeAlias = "tuple[FetchState, FetchActions]"


@dataclass(frozen=True, slots=True)
class LandedChunks:
    """Run the request with the chunks that have landed."""

    # Blocks that the engine need not compute, [start, end), after the cached ones: filled by
    # fetches, or of a unneeded chunk. Ascending and disjoint.
    runs: tuple[tuple[int, int], ...] = ()
    chunks: int = 0  # number of landed chunks


@dataclass(frozen=True, slots=True)
class FetchActions:
    """What the Fetcher does next, in the order of the fields."""

    release: bool = False  # release the reserved blocks; no fetch into them is in flight
    fetch: tuple[int, ...] = ()  # chunks to fetch, ascending
    admit: LandedChunks | None = None
    forget: bool = False  # drop the request: it was aborted and has settled


@dataclass(frozen=True, slots=True)
class FetchState:
    """State of one parked request. Sets of chunks are bit sets."""

    chunks: int  # number of full chunks of its known tokens
    chunk_blocks: int
    # Must not run yet: it waits for (No)FirstTokens or, if it is a prefill job, for its lookup.
    awaits_first: bool = False
    cached_blocks: int = 0  # leading blocks in this node's cache; an estimate until reserve()
    unneeded: int = 0  # chunks of which no KV is needed once the later ones have landed
    exists: int = 0  # chunks announced or found
    flying: int = 0  # chunks whose fetch is in flight
    renewed: int = 0  # chunks announced again while their fetch is in flight
    landed: int = 0  # chunks fetched into the reserved blocks
    lost: int = 0  # chunks whose fetch failed
    held: bool = False  # the request has reserved blocks
    ended: bool = False  # no more chunks will be announced
    expired: bool = False  # the wait timed out
    returning: bool = False  # blocks will be released when no fetch is in flight
    aborted: bool = False
    over: bool = False  # admitted or forgotten

    @property
    def own(self) -> int:
        """Number of leading chunks that this node's cache holds completely."""
        return min(self.chunks, self.cached_blocks // self.chunk_blocks)

    @property
    def have(self) -> int:
        """Chunks of which this node has all the KV that it needs."""
        return first_chunks(self.own) | self.landed | self.unneeded

    @property
    def fetchable(self) -> int:
        """Chunks that exist, are needed, are not on this node, not in flight and not lost."""
        return self.exists & ~self.have & ~self.flying & ~self.lost

    @property
    def wants_blocks(self) -> bool:
        """True if only reserved blocks are missing to start a fetch."""
        return not (self.held or self.over or self.aborted or self.expired) and self.fetchable != 0

    @property
    def missing_chunks(self) -> int:
        """Chunks that may still come: in flight, to be fetched, or not announced yet."""
        coming = self.flying | self.fetchable
        if not self.ended:
            coming |= first_chunks(self.chunks) & ~self.have & ~self.lost
        return coming

    def start(self) -> FetchTransition:
        """Return the state and the actions before the first event."""
        return self._become()

    def announce(self, chunks: int, unneeded: int = 0) -> FetchTransition:
        """These chunks exist and suffice, and no KV is needed of the `unneeded` ones (bit sets). A
        lost chunk that is announced again was put again."""
        existing = chunks & first_chunks(self.chunks)
        return self._become(
            unneeded=self.unneeded | unneeded,
            exists=self.exists | existing,
            lost=self.lost & ~existing,
            renewed=self.renewed | (existing & self.flying),
        )

    def end(self) -> FetchTransition:
        """No more chunks will be announced: the prefill node has finished or is dead, or the lookup
        was answered."""
        return self._become(ended=True)

    def reserve(self, cached: int) -> FetchTransition:
        """Blocks for all tokens are reserved; the first `cached` of them already hold KV."""
        return self._become(held=True, cached_blocks=cached)

    def land(self, chunk: int) -> FetchTransition:
        """The fetch of a chunk has succeeded."""
        bit = self.flying & 1 << chunk
        return self._become(
            flying=self.flying & ~bit, renewed=self.renewed & ~bit, landed=self.landed | bit
        )

    def lose(self, chunk: int) -> FetchTransition:
        """The fetch of a chunk has failed. A chunk announced again meanwhile is fetched again."""
        bit = self.flying & 1 << chunk
        return self._become(
            flying=self.flying & ~bit,
            renewed=self.renewed & ~bit,
            lost=self.lost | (bit & ~self.renewed),
        )

    def know_first(self) -> FetchTransition:
        """The router sent FirstTokens or NoFirstTokens for this attempt, or a prefill job's lookup
        was answered."""
        return self._become(awaits_first=False)

    def time_out(self) -> FetchTransition:
        """The wait for chunks has timed out. Ignored while the request awaits its first tokens:
        only the router ends that wait."""
        return self._become(expired=self.expired or not self.awaits_first)

    def give_back(self) -> FetchTransition:
        """Release the blocks, because the running batch needs them."""
        return self._become(returning=self.held)

    def abort(self) -> FetchTransition:
        return self._become(aborted=True)

    def _become(self, **changes: Any) -> FetchTransition:
        """Return the state with these changes, and the actions. Events after the end change
        nothing."""
        if self.over:
            return self, FetchActions()
        return replace(self, **changes)._advance()

    def _advance(self) -> FetchTransition:
        if self.aborted:
            if self.flying:
                return self, FetchActions()
            gone = replace(self, held=False, over=True)
            return gone, FetchActions(release=self.held, forget=True)
        if self.returning and self.flying:
            return self, FetchActions()
        state = self
        fetch: tuple[int, ...] = ()
        if self.returning:
            # Landed chunks are lost with the blocks, but still exist in the store.
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
        return self.expired or not self.missing_chunks

    def _admission(self) -> LandedChunks:
        """Return the landed and the unneeded runs. Of a partly cached chunk they include only the
        blocks that were not cached. If nothing has landed, all is computed, so all KV is needed."""
        size = self.chunk_blocks
        ready = self.landed | (self.unneeded & ~first_chunks(self.own) if self.landed else 0)
        runs = tuple(
            (max(first * size, self.cached_blocks), (first + count) * size)
            for first, count in runs_of(ready)
        )
        return LandedChunks(runs, self.landed.bit_count())
