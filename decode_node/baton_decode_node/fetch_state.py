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

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton_node.engine.job import Job, JobKey, LoopContext, chunks_of, first_chunks, runs_of
from baton_node.settings import FetchPolicy
from baton_node.store.base import PADDING, ChunkRef
from baton_protocol.ids import RequestId
from baton_protocol.layout import KVLayout
from baton_protocol.store import DataInstance, InboxEntry, Priority

SAMPLE_EVERY_S = 10.0
NOBODY = RequestId("")  # whose chunk a sample is


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """What this node measured; 0 is not measured."""

    layout: KVLayout
    prefill_tokens_per_s: float
    instances: Sequence[DataInstance]


@dataclass(frozen=True, slots=True)
class FetchDecision:
    """Chunks as bit sets; `declined` ones exist and are cheaper to compute. The times are those of
    all that was weighed, had it all been fetched or all been computed; 0 where not measured."""

    fetch: int = 0
    declined: int = 0
    fetch_ms: float = 0.0
    compute_ms: float = 0.0


def decide(
    chunks: Mapping[int, int],
    cached_blocks: int,
    costs: FetchCosts,
    policy: FetchPolicy = "auto",
) -> FetchDecision:
    """`chunks` maps those that exist to the number of their data server; the first `cached_blocks`
    blocks of the chain are here already."""
    size = costs.layout.chunk_blocks
    wanted = {
        chunk: instance
        for chunk, instance in chunks.items()
        if (chunk + 1) * size > cached_blocks and not _seen(costs, instance).trouble
    }
    fetch = declined = 0
    fetch_s = compute_s = 0.0
    for run in _runs(wanted):
        bits = sum(1 << chunk for chunk in run)
        blocks = (run[-1] + 1) * size - max(run[0] * size, cached_blocks)
        to_fetch = _fetch_s([wanted[chunk] for chunk in run], costs)
        to_compute = _compute_s(blocks, costs)
        if policy == "always" or (policy == "auto" and _pays(to_fetch, to_compute)):
            fetch |= bits
        else:
            declined |= bits
        fetch_s += to_fetch
        compute_s += to_compute
    return FetchDecision(fetch, declined, fetch_s * 1e3, compute_s * 1e3)


def _pays(fetch_s: float, compute_s: float) -> bool:
    """0.0 is not measured."""
    return not (fetch_s and compute_s) or fetch_s < compute_s


def _fetch_s(instances: Sequence[int], costs: FetchCosts) -> float:
    """Seconds to fetch one chunk from each of `instances`, which work side by side; 0.0 where one
    was not measured."""
    slowest = 0.0
    for instance, count in Counter(instances).items():
        seen = _seen(costs, instance)
        if seen.get_bytes_per_s <= 0.0:
            return 0.0
        moved = count * costs.layout.chunk_bytes / seen.get_bytes_per_s
        slowest = max(slowest, seen.get_latency_ms / 1e3 + moved)
    return slowest


def _compute_s(blocks: int, costs: FetchCosts) -> float:
    if costs.prefill_tokens_per_s <= 0.0:
        return 0.0
    return blocks * costs.layout.block_size / costs.prefill_tokens_per_s


def _seen(costs: FetchCosts, instance: int) -> DataInstance:
    known = 0 <= instance < len(costs.instances)
    return costs.instances[instance] if known else DataInstance()


def _runs(chunks: Mapping[int, int]) -> list[list[int]]:
    """Neighbouring chunks together, in order."""
    runs: list[list[int]] = []
    for chunk in sorted(chunks):
        if runs and runs[-1][-1] + 1 == chunk:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


class FetchChooser:
    """Fetch from the store, or compute? One pure decision per run of chunks.

    Moving KV beats computing it only where the link is faster than bytes per token x tokens/s of
    prefill: a small model on a fast device computes sooner than any network brings. So a run of
    neighbouring chunks is fetched if

        max over its data servers of (latency + bytes there / rate of gets) < tokens / prefill speed

    and computed otherwise. What was not measured is fetched: that measures it. Chunks on a server
    in trouble count as absent, whatever the policy. Nothing is weighed for a hand-off's chunks: the
    router did that.

    `decide` is pure. `FetchChooser` applies it, and keeps its figures true: where everything is
    declined nothing is fetched, and a rate measured in a bad moment would be believed for ever. So
    of what was declined one chunk per data server is read now and then, behind everything else and
    into nothing: that measures the server and costs no request anything.

    In: where chunks are, how much the own cache holds, measured speeds. Out: which to fetch, and
    the numbers; KVConnector.fetch of samples.

    Owned by the step loop's thread.
    """

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._policy: FetchPolicy = context.options.fetch
        self._sampled: dict[int, float] = {}  # data server -> when

    def choose(self, job: Job, cached_blocks: int) -> FetchDecision:
        """Which of the chunks that have a marker this job should fetch."""
        context = self._context
        speed = context.speeds.speeds().prefill_tokens_per_s
        costs = FetchCosts(context.layout, speed, context.connector.instances())
        places = {chunk: marker.instance for chunk, marker in job.markers.items()}
        decision = decide(places, cached_blocks, costs, self._policy)
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
                ref = ChunkRef(NOBODY, 0, chunk, job.chunks[chunk])
                nowhere = (PADDING,) * self._context.layout.chunk_blocks
                self._context.connector.fetch(ref, marker, nowhere, Priority.BEHIND)


MAX_ENTRIES = 8192
KEEP_S = 30.0


class EarlyAnnouncements:
    """Inbox entries that came before the job they belong to.

    A prefill node may announce chunks before the router's RunJob has arrived here. Entries are kept
    by (request, attempt), a bounded number of them for a bounded time, and handed over with the
    job.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[JobKey, tuple[float, list[InboxEntry]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Entries kept."""
        return self._count

    def put(self, entry: InboxEntry) -> None:
        """Keep an entry; the oldest requests' go when there are too many or they are too old."""
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
        """What came for this job so far, in order."""
        _, entries = self._entries.pop(key, (0.0, []))
        self._count -= len(entries)
        return entries


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
