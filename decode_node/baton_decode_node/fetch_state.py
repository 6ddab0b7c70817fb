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
suffices follows from the prompt's length. A lookup may find less, and then `usable` finds out what
the rest is good for.

It has one method per event, and events may come in any order. Each method returns the next state
and the actions for the step loop.

Invariants for every order of events (tests/decode_node/test_fetch_state.py):
  - A fetch needs reserved blocks. Blocks are released or handed to the engine only when no fetch
    into them is in flight, also on abort and timeout.
  - An admission names exactly the landed and the unneeded chunks, and there is at most one. After
    it, and after `forget`, there are no actions.
  - A lost chunk leaves only a hole: chunks after it are still fetched and used. No request waits
    for a lost chunk. If it is announced again, it is fetched again.

Sets of chunks are bit sets in ints: immutable, and 8,192 chunks take 1 KiB.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton_engine.interface import PADDING
from baton_node.engine.job import Job, JobKey, LoopContext, chunks_of, first_chunks, runs_of
from baton_node.store.base import ChunkRef
from baton_protocol.ids import RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.policies import FetchPolicy
from baton_protocol.store import DataInstance, InboxEntry, Priority

SAMPLE_EVERY_S = 10.0
NO_REQUEST = RequestId("")  # the request id of a sample


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """What `decide` needs: this node's measured speeds. A speed of 0 is not measured."""

    layout: KVLayout
    prefill_tokens_per_s: float
    instances: Sequence[DataInstance]


def usable(
    layout: KVLayout, chunks: int, exists: int, complete: int, cached_blocks: int
) -> tuple[int, int]:
    """Return which stored chunks save computation, and of which chunks no KV is needed then.

    All sets are bit sets of a prompt's `chunks` full chunks: `exists` are stored, `complete` of
    these with the blocks of all groups. The node's cache holds the first `cached_blocks` blocks.

    A computed token needs the last `window` tokens before it in the groups with a window. So seen
    from the prompt's end, a chunk that these tokens reach is useful only if it is complete.
    Otherwise it is computed, and then needs the tokens before it.
    """
    if layout.window is None:
        return exists, 0
    tokens, partial = layout.chunk_tokens, layout.num_full_groups > 0
    useful = unneeded = 0
    seen = layout.window_start(chunks * tokens - 1)  # the first token that the windows reach
    for chunk in range(chunks - 1, cached_blocks // layout.chunk_blocks - 1, -1):
        bit = 1 << chunk
        if (chunk + 1) * tokens > seen:
            stored = complete & bit
        elif partial:
            stored = exists & bit
        else:
            unneeded |= bit
            continue
        useful |= stored
        if not stored:
            computed = max(chunk * tokens, cached_blocks * layout.block_size)
            seen = layout.window_start(computed)
    return useful, unneeded


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """Which chunks to fetch. The sets are bit sets.

    The times are predictions for all considered chunks together: to fetch them all, and to compute
    them all. Runs of chunks with unmeasured speeds count as 0.
    """

    fetch: int = 0
    declined: int = 0  # chunks that exist, but are not fetched
    unneeded: int = 0  # chunks of which no KV is needed if the chunks in `fetch` are fetched
    fetch_ms: float = 0.0
    compute_ms: float = 0.0


def decide(
    chunks: Mapping[int, int],
    cached_blocks: int,
    costs: FetchCosts,
    policy: FetchPolicy = "auto",
    *,
    partial: int = 0,
    unneeded: int = 0,
) -> FetchDecision:
    """Decide for each run of neighbouring chunks whether to fetch it.

    `chunks` maps each existing chunk to the number of its data server. The node's cache already
    holds the first `cached_blocks` blocks of the prompt. Chunks in `partial` are stored without the
    groups with a window. Chunks in `unneeded` belong to a run, but are not fetched (see `usable`).
    """
    size = costs.layout.chunk_blocks
    wanted = {
        chunk: instance
        for chunk, instance in chunks.items()
        if (chunk + 1) * size > cached_blocks and not _seen(costs, instance).trouble
    }
    fetch = declined = 0
    fetch_s = compute_s = 0.0
    for run in _runs({*wanted, *chunks_of(unneeded)}):
        stored = {chunk: wanted[chunk] for chunk in run if chunk in wanted}
        bits = sum(1 << chunk for chunk in stored)
        blocks = (run[-1] + 1) * size - max(run[0] * size, cached_blocks)
        to_fetch = _fetch_s(stored, partial, costs)
        to_compute = _compute_s(blocks, costs)
        if policy == "always" or (policy == "auto" and _pays(to_fetch, to_compute)):
            fetch |= bits
        else:
            declined |= bits
            unneeded &= ~sum(1 << chunk for chunk in run)
        fetch_s += to_fetch
        compute_s += to_compute
    return FetchDecision(fetch, declined, unneeded, fetch_s * 1e3, compute_s * 1e3)


def _pays(fetch_s: float, compute_s: float) -> bool:
    """Return whether fetching is faster. 0.0 means not measured; then fetch, which measures it."""
    return not (fetch_s and compute_s) or fetch_s < compute_s


def _fetch_s(chunks: Mapping[int, int], partial: int, costs: FetchCosts) -> float:
    """Return the predicted seconds to fetch chunks (see `decide`).

    Servers work in parallel. 0.0 if the speed of one of the servers is not measured.
    """
    complete_bytes, partial_bytes = costs.layout.chunk_bytes, costs.layout.full_groups_bytes
    sizes: Counter[int] = Counter()
    for chunk, instance in chunks.items():
        sizes[instance] += partial_bytes if partial >> chunk & 1 else complete_bytes
    slowest = 0.0
    for instance, size in sizes.items():
        seen = _seen(costs, instance)
        if seen.get_bytes_per_s <= 0.0:
            return 0.0
        slowest = max(slowest, seen.get_latency_ms / 1e3 + size / seen.get_bytes_per_s)
    return slowest


def _compute_s(blocks: int, costs: FetchCosts) -> float:
    if costs.prefill_tokens_per_s <= 0.0:
        return 0.0
    return blocks * costs.layout.block_size / costs.prefill_tokens_per_s


def _seen(costs: FetchCosts, instance: int) -> DataInstance:
    known = 0 <= instance < len(costs.instances)
    return costs.instances[instance] if known else DataInstance()


def _runs(chunks: Iterable[int]) -> list[list[int]]:
    """Group neighbouring chunks, in ascending order."""
    runs: list[list[int]] = []
    for chunk in sorted(chunks):
        if runs and runs[-1][-1] + 1 == chunk:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


class FetchChooser:
    """Chooses between fetching chunks from the store and computing them.

    Moving KV is faster than computing it only if the link is faster than bytes per token x prefill
    tokens/s: a small model on a fast device computes faster than any network transfers. So a run of
    neighbouring chunks is fetched if

        max over its data servers of (latency + bytes there / get rate) < tokens / prefill speed

    and computed otherwise. If a speed is not measured, the run is fetched, which measures it.
    Chunks on a server in trouble count as absent, whatever the policy. Chunks of a hand-off do not
    come here: the router has already decided to fetch them.

    `decide` is pure. `FetchChooser` applies it and keeps the measured rates fresh. If every chunk
    is declined, nothing is fetched, and a rate measured at a bad moment would never change. So
    every SAMPLE_EVERY_S seconds it reads one declined chunk per data server, at the lowest priority
    and into padding blocks. That measures the server at no cost to requests.

    Owned by the step loop's thread.
    """

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._policy: FetchPolicy = context.options.fetch
        self._sampled: dict[int, float] = {}  # data server -> time of its last sample

    def choose(self, job: Job, cached_blocks: int) -> FetchDecision:
        """Decide which of the chunks with a marker this job fetches."""
        context = self._context
        speed = context.speeds.speeds().prefill_tokens_per_s
        layout = context.layout
        costs = FetchCosts(layout, speed, context.connector.instances())
        exists = complete = 0
        for chunk, marker in job.markers.items():
            if not _seen(costs, marker.instance).trouble:
                exists |= 1 << chunk
                complete |= (marker.payload_bytes == job.complete_bytes) << chunk
        useful, unneeded = usable(layout, len(job.chunks), exists, complete, cached_blocks)
        decision = decide(
            {chunk: job.markers[chunk].instance for chunk in chunks_of(useful)},
            cached_blocks,
            costs,
            self._policy,
            partial=exists & ~complete,
            unneeded=unneeded,
        )
        if self._policy == "auto":
            self._sample(job, decision.declined)
        return decision

    def _sample(self, job: Job, declined: int) -> None:
        now = self._context.clock()
        for chunk, marker in job.markers.items():
            last = self._sampled.get(marker.instance)
            due = last is None or now >= last + SAMPLE_EVERY_S
            if due and declined >> chunk & 1:
                self._sampled[marker.instance] = now
                ref = ChunkRef(NO_REQUEST, 0, chunk, job.chunks[chunk])
                layout = self._context.layout
                padding = (PADDING,) * (layout.chunk_blocks * layout.num_groups)
                self._context.connector.fetch(ref, marker, padding, Priority.BEHIND)


MAX_ENTRIES = 8192
KEEP_S = 30.0


class EarlyAnnouncements:
    """Inbox entries that arrived before their job.

    A prefill node may announce chunks before the router's RunJob arrives here. Entries are kept by
    (request, attempt) until the job arrives: at most MAX_ENTRIES entries, for at most KEEP_S
    seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[JobKey, tuple[float, list[InboxEntry]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Number of entries kept."""
        return self._count

    def put(self, entry: InboxEntry) -> None:
        """Keep an entry. If there are too many, or old ones, drop those of the oldest requests."""
        now = self._clock()
        _, entries = self._entries.setdefault((entry.request, entry.attempt), (now, []))
        entries.append(entry)
        self._count += 1
        while self._entries:
            since, oldest = next(iter(self._entries.values()))
            if self._count <= MAX_ENTRIES and now - since <= KEEP_S:
                return
            self._entries.popitem(last=False)
            self._count -= len(oldest)

    def take(self, key: JobKey) -> list[InboxEntry]:
        """Remove and return the entries of this job, in order of arrival."""
        _, entries = self._entries.pop(key, (0.0, []))
        self._count -= len(entries)
        return entries


# Most fetches of one request in flight: enough to keep the transfer threads busy, and few enough
# that an aborted request settles soon and that requests share the link.
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Admission:
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
    admit: Admission | None = None
    forget: bool = False  # drop the request: it was aborted and has settled


Outcome = tuple["FetchState", FetchActions]
NOTHING = FetchActions()


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
    def missing(self) -> int:
        """Chunks that may still come: in flight, to be fetched, or not announced yet."""
        coming = self.flying | self.fetchable
        if not self.ended:
            coming |= first_chunks(self.chunks) & ~self.have & ~self.lost
        return coming

    def start(self) -> Outcome:
        """Return the state and the actions before the first event."""
        return self._become()

    def announce(self, chunks: int, unneeded: int = 0) -> Outcome:
        """These chunks exist and suffice, and no KV is needed of the `unneeded` ones (bit sets). A
        lost chunk that is announced again was put again."""
        known = chunks & first_chunks(self.chunks)
        return self._become(
            unneeded=self.unneeded | unneeded,
            exists=self.exists | known,
            lost=self.lost & ~known,
            renewed=self.renewed | (known & self.flying),
        )

    def end(self) -> Outcome:
        """No more chunks will be announced: the prefill node has finished or is dead, or the lookup
        was answered."""
        return self._become(ended=True)

    def reserve(self, cached: int) -> Outcome:
        """Blocks for all tokens are reserved; the first `cached` of them already hold KV."""
        return self._become(held=True, cached_blocks=cached)

    def land(self, chunk: int) -> Outcome:
        """The fetch of a chunk has succeeded."""
        bit = self.flying & 1 << chunk
        return self._become(
            flying=self.flying & ~bit, renewed=self.renewed & ~bit, landed=self.landed | bit
        )

    def lose(self, chunk: int) -> Outcome:
        """The fetch of a chunk has failed. A chunk announced again meanwhile is fetched again."""
        bit = self.flying & 1 << chunk
        return self._become(
            flying=self.flying & ~bit,
            renewed=self.renewed & ~bit,
            lost=self.lost | (bit & ~self.renewed),
        )

    def know_first(self) -> Outcome:
        """The router sent FirstTokens or NoFirstTokens for this attempt, or a prefill job's lookup
        was answered."""
        return self._become(awaits_first=False)

    def time_out(self) -> Outcome:
        """The wait for chunks has timed out. Ignored while the request awaits its first tokens:
        only the router ends that wait."""
        return self._become(expired=self.expired or not self.awaits_first)

    def give_back(self) -> Outcome:
        """Release the blocks, because the running batch needs them."""
        return self._become(returning=self.held)

    def abort(self) -> Outcome:
        return self._become(aborted=True)

    def _become(self, **changes: Any) -> Outcome:
        """Return the state with these changes, and the actions. Events after the end change
        nothing."""
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
        return self.expired or not self.missing

    def _admission(self) -> Admission:
        """Return the landed and the unneeded runs. Of a partly cached chunk they include only the
        blocks that were not cached. If nothing has landed, all is computed, so all KV is needed."""
        size = self.chunk_blocks
        ready = self.landed | (self.unneeded & ~first_chunks(self.own) if self.landed else 0)
        runs = tuple(
            (max(first * size, self.cached_blocks), (first + count) * size)
            for first, count in runs_of(ready)
        )
        return Admission(runs, self.landed.bit_count())
