"""Nodes and a store in simulated time, for replays of traces: a discrete-event model.

The timing model is that of the `sim` engine (baton_engine.sim.build), with caches and links:

    step       DECODE_MS + DECODE_MS_PER_SEQ x decoding sequences + TOKEN_MS x prompt tokens in it,
               of which a step takes at most STEP_TOKENS, first come first served; it gives each
               decoding sequence one token
    link       one per node, 1 / LINK_BYTES_PER_S a byte, one transfer after the other, and
               LATENCY_S before the first byte
    hand-off   chunks travel while later ones are computed: the decode node has all of them when its
               link has brought them, and not before the last one was computed and brought
    caches     chunks, least recently used first out, on each node and in the store; a node fetches
               what the store has beyond its own prefix where that is faster than computing it
    telling    a load each LOAD_S, cache events each EVENTS_S, as nodes do

Left out: KV memory of running sequences (no preemption), tokenization, HTTP.

In: jobs with their chunks, lengths and a place. Out: when each job's tokens came.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from baton_protocol.ids import BlockHash, Epoch
from baton_protocol.link import CacheEvents, Load
from baton_protocol.store import NodeLoad, Role, Speeds
from baton_router.requests.in_flight import InFlightRequest
from benchmarks.support.router.placement_pool import layout

SHAPE = layout(8)
DECODE_MS, DECODE_MS_PER_SEQ, TOKEN_MS = 8.0, 0.15, 0.125
STEP_TOKENS = 2048
LINK_BYTES_PER_S, LATENCY_S = 2.5e9, 0.001
CHUNK_S = SHAPE.chunk_bytes / LINK_BYTES_PER_S
LOAD_S, EVENTS_S = 0.25, 0.1
NODE_CHUNKS, STORE_CHUNKS = 600, 4000
EPOCH = Epoch("e")


class Timeline:
    """What happens when; equal times in the order they were asked for. Seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, act))

    def run(self, until: Callable[[], bool]) -> None:
        while self._events and not until():
            self.now, _, act = heapq.heappop(self._events)
            act()


class Chunks:
    """A bounded set of chunks. `news` are the chunks added and removed since it was last read."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[BlockHash, None] = OrderedDict()
        self._news: dict[BlockHash, bool] = {}

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._held

    def add(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            if name not in self._held:
                self._news[name] = True
            self._held[name] = None
            self._held.move_to_end(name)
        while len(self._held) > self._most:
            gone, _ = self._held.popitem(last=False)
            self._news[gone] = False

    def prefix(self, names: tuple[BlockHash, ...]) -> int:
        """How many leading ones are held; they count as used."""
        for index, name in enumerate(names):
            if name not in self._held:
                return index
            self._held.move_to_end(name)
        return len(names)

    def news(self) -> CacheEvents:
        stored = tuple(name for name, came in self._news.items() if came)
        evicted = tuple(name for name, came in self._news.items() if not came)
        self._news.clear()
        return CacheEvents(EPOCH, stored, evicted)


@dataclass(slots=True)
class Job:
    """One request. `answer` tokens are generated; `after` are the chunks that exist at its end."""

    request: InFlightRequest
    arrived: float
    prompt: int
    answer: int
    after: tuple[BlockHash, ...]
    prefill: Node | None = None
    decode: Node | None = None
    left: int = 0  # tokens that the node it is on has to compute
    first_at: float = 0.0
    ended_at: float = 0.0

    @property
    def chunks(self) -> tuple[BlockHash, ...]:
        return self.request.prepared.chunks

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrived

    @property
    def itl_s(self) -> float:
        return (self.ended_at - self.first_at) / max(1, self.answer - 1)


@dataclass(slots=True)
class Node:
    """One engine. It calls `on_first` at a first token and `on_end` at the last."""

    name: str
    role: Role
    time: Timeline
    store: Chunks
    on_first: Callable[[Node, Job], None]
    on_end: Callable[[Job], None]
    cache: Chunks = field(default_factory=lambda: Chunks(NODE_CHUNKS))
    link_free: float = 0.0
    steps: int = 0
    queue: deque[Job] = field(default_factory=deque)
    fetching: int = 0
    decoding: list[tuple[int, int, Job]] = field(default_factory=list)  # by their last step
    busy: bool = False
    joined: int = 0

    def begin(self, job: Job) -> None:
        """Compute its prompt, with what is cached and what is worth fetching."""
        held = self.cache.prefix(job.chunks)
        found = sum(name in self.store for name in job.chunks[held:])
        fetch_s = LATENCY_S + found * CHUNK_S
        worth = 0 < fetch_s < found * SHAPE.chunk_tokens * TOKEN_MS / 1000
        job.left = max(1, job.prompt - (held + found * worth) * SHAPE.chunk_tokens)
        if not worth:
            self._enqueue(job)
            return
        self.fetching += 1
        self.link_free = max(self.link_free, self.time.now) + found * CHUNK_S
        self.time.at(self.link_free + LATENCY_S, lambda: self._fetched(job))

    def receive(self, job: Job, began: float) -> None:
        """A prefill node has computed it just now, since `began`: bring the chunks, then decode."""
        lacking = len(job.chunks) - self.cache.prefix(job.chunks)
        job.left = max(1, job.prompt - len(job.chunks) * SHAPE.chunk_tokens)
        if not lacking:
            self._enqueue(job)
            return
        self.link_free = max(self.link_free, began) + lacking * CHUNK_S
        here = max(self.link_free, self.time.now + CHUNK_S) + LATENCY_S
        self.time.at(here, lambda: self._enqueue(job))

    def load(self) -> Load:
        waiting, running = len(self.queue) + self.fetching, len(self.decoding)
        figures = NodeLoad(
            waiting=waiting,
            running=running,
            requests=waiting + running,
            queued_tokens=sum(job.left for job in self.queue),
            engine_steps_total=self.steps,
        )
        return Load(EPOCH, "ready", self.speeds(), figures)

    def speeds(self) -> Speeds:
        return Speeds(
            prefill_tokens_per_s=1000 / TOKEN_MS,
            decode_step_ms=DECODE_MS + DECODE_MS_PER_SEQ * len(self.decoding),
            put_bytes_per_s=LINK_BYTES_PER_S,
            get_bytes_per_s=LINK_BYTES_PER_S,
            get_latency_ms=1000 * LATENCY_S,
        )

    def _fetched(self, job: Job) -> None:
        self.fetching -= 1
        self._enqueue(job)

    def _enqueue(self, job: Job) -> None:
        self.queue.append(job)
        if not self.busy:
            self._step()

    def _step(self) -> None:
        """Start one, if there is anything to do."""
        self.busy = bool(self.queue or self.decoding)
        if not self.busy:
            return
        budget, done = STEP_TOKENS, []
        while self.queue and budget:
            job = self.queue[0]
            part = min(job.left, budget)
            job.left -= part
            budget -= part
            if not job.left:
                done.append(self.queue.popleft())
        taken = STEP_TOKENS - budget
        took_ms = DECODE_MS + DECODE_MS_PER_SEQ * len(self.decoding) + TOKEN_MS * taken
        self.time.at(self.time.now + took_ms / 1000, lambda: self._stepped(done))

    def _stepped(self, done: list[Job]) -> None:
        self.steps += 1
        while self.decoding and self.decoding[0][0] <= self.steps:
            self._end(heapq.heappop(self.decoding)[2])
        for job in done:
            self.cache.add(job.chunks)
            self.store.add(job.chunks)
            if not job.first_at:
                job.first_at = self.time.now
                self.on_first(self, job)
            if self is job.decode:
                self._join(job)
        self._step()

    def _join(self, job: Job) -> None:
        if job.answer <= 1:
            self._end(job)
            return
        self.joined += 1
        heapq.heappush(self.decoding, (self.steps + job.answer - 1, self.joined, job))

    def _end(self, job: Job) -> None:
        self.cache.add(job.after)
        job.ended_at = self.time.now
        self.on_end(job)
