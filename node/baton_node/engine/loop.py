"""The step loop: one thread that owns the engine and decides everything in the engine process.

One turn: the server's frames, the connector's events, timers, blocks for parked requests, one
engine step, what the step means for the server and for the prefill jobs' chunks. With nothing to do
it sleeps in select() on the server's socket and the connector's file descriptor.

In: PrefillJob, RunJob, FirstTokens, NoFirstTokens, Abort, FinishChoice, Drain, Undrain; chunks and
inbox entries. Out: Step, JobFailed, Load, CacheEvents, Saved, Drained; chunks and inbox entries.
"""

from __future__ import annotations

import logging
import select
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from baton_engine.interface import Engine
from baton_node.engine.counters import Counters
from baton_node.engine.early_announcements import EarlyAnnouncements
from baton_node.engine.fetch_chooser import FetchChooser
from baton_node.engine.fetch_state import FetchState
from baton_node.engine.fetcher import Fetcher, FetchWaits
from baton_node.engine.job import Job, JobKey, Times, check_request
from baton_node.engine.publisher import Publisher
from baton_node.engine.reporter import Reporter
from baton_node.engine.running import RunningBatch
from baton_node.engine.speeds import SpeedMeter
from baton_node.ipc.engine_socket import EngineSocket
from baton_node.ipc.messages import Drain, Drained, FinishChoice, Saved, Start, ToEngine, Undrain
from baton_node.settings import FetchPolicy
from baton_node.store.base import ConnectorEvent, Copied, Fetched, KVConnector, LookedUp, Published
from baton_protocol.errors import BatonError, DeadlineExceeded, Unavailable
from baton_protocol.hashing import chunk_hashes
from baton_protocol.ids import BlockHash, Epoch, RequestId
from baton_protocol.link import Abort, FirstTokens, JobFailed, NoFirstTokens, PrefillJob, RunJob
from baton_protocol.store import InboxEntry, Priority, Speeds

logger = logging.getLogger(__name__)

IDLE_S = 0.2  # at most this long in one select()
STUCK_S = 0.002  # pause after a step that could run nothing: blocks are on their way back
PAUSE_S = 2.0  # without shortage, before parked requests get blocks again
REMEMBERED = 4096  # requests whose latest attempt is known
# Between two looks at all deadlines; one look at 4,096 requests takes 0.4 ms.
EXPIRE_EVERY_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    epoch: Epoch
    lookup_wait_s: float = 0.1
    first_wait_s: float = 2.0
    blocks_wait_s: float = 30.0
    load_every_s: float = 0.2
    events_every_s: float = 0.1
    fetch: FetchPolicy = "auto"  # of what a lookup found
    speeds: Speeds = field(default_factory=Speeds)


class EngineLoop:
    """Owned by one thread."""

    def __init__(
        self,
        engine: Engine,
        connector: KVConnector,
        port: EngineSocket,
        options: LoopOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._port = port
        self._clock = clock
        self._chunk_blocks = engine.info.layout.chunk_blocks
        self.counters = Counters()
        waits = FetchWaits(options.lookup_wait_s, options.first_wait_s, options.blocks_wait_s)
        speeds = SpeedMeter(options.speeds)
        self._publisher = Publisher(engine, connector, self.counters, clock)
        self._batch = RunningBatch(engine, port, self._publisher, self.counters, speeds, clock)
        batch = self._batch
        self._lot = Fetcher(engine, connector, self.counters, waits, batch.admit, batch.fail, clock)
        layout = engine.info.layout
        self._weigher = FetchChooser(layout, connector, speeds, options.fetch, clock)
        self._stash = EarlyAnnouncements(clock)
        self._reporter = Reporter(
            engine,
            self.counters,
            speeds,
            connector,
            self,
            options.epoch,
            load_every_s=options.load_every_s,
            events_every_s=options.events_every_s,
        )
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()
        self._arrivals = 0
        self._ended = 0
        self._short_at: float | None = None  # of blocks: parked ones get none
        self._next_expiry = 0.0
        self._saving = self._draining = False  # a Drain waits for Saved, for Drained

    @property
    def idle(self) -> bool:
        """True when no request is here and no block is held for a transfer."""
        return not self._batch and self._lot.empty and self._publisher.empty

    @property
    def stamp(self) -> tuple[int, ...]:
        """Another one whenever a request has come, was admitted, has its prompt, or has ended."""
        batch = self._batch
        return self.counters.jobs, len(self._lot), len(batch), batch.ended, batch.prompted

    @property
    def parked(self) -> int:
        """Sequences."""
        return self._lot.sequences

    @property
    def parked_tokens(self) -> int:
        return self._lot.tokens

    @property
    def stashed(self) -> int:
        """Inbox entries that wait for their job."""
        return len(self._stash)

    def run(self) -> None:
        """Turn until the port closes; PortClosed is how it ends."""
        stuck = False
        while True:
            self._sleep(stuck)
            stuck = not self.turn()

    def turn(self) -> bool:
        """One turn, without sleeping. False when there was work and none could be done."""
        for frame in self._port.receive():
            self._take(frame)
        for event in self._connector.poll():
            self._happened(event)
        now = self._clock()
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRE_EVERY_S
            self._end_late_ones(now)
        self._lot.expire(now)
        if self._short_at is None:
            self._lot.grant()
        moved = self._batch.step() if self._engine.has_work() else True
        self._share_blocks()
        for report in self._reporter.due(self._clock()):
            self._port.send(report)
        self._answer_drain()
        return moved

    def _answer_drain(self) -> None:
        if self._saving and self._publisher.saved:
            self._saving = False
            self._port.send(Saved())
        if self._draining and self.idle:
            self._draining = False
            self._port.send(Drained())

    def _share_blocks(self) -> None:
        """Parked requests make room for the running batch, and get none until it has freed some
        or has done without for a while."""
        now = self._clock()
        if self._engine.has_work() and self._engine.starved():
            self._short_at = now
            self._lot.give_back()
        elif self._short_at is not None:
            freed = self._batch.ended != self._ended or not self._engine.has_work()
            if freed or now >= self._short_at + PAUSE_S:
                self._short_at = None
        self._ended = self._batch.ended

    def _sleep(self, stuck: bool) -> None:
        if self._engine.has_work():
            timeout = STUCK_S if stuck else 0.0
        else:
            due = [self._reporter.next_due, self._lot.next_deadline() or self._reporter.next_due]
            timeout = min(IDLE_S, max(0.0, min(due) - self._clock()))
        if timeout > 0.0:
            select.select([self._port.fileno(), self._connector.fileno()], [], [], timeout)

    # --- the server's frames --------------------------------------------------------------------

    def _take(self, frame: ToEngine) -> None:
        match frame:
            case PrefillJob() | RunJob():
                self.counters.jobs += 1
                self._accept(frame)
            case FirstTokens():
                self._first(frame)
            case NoFirstTokens():
                job = self._lot.get((frame.request, frame.attempt))
                if job is not None and job.kind == "run":
                    job.times.handed_off = self._clock()
                    self._lot.apply(job, job.parked.know_first())
            case Abort():
                self._abort((frame.request, frame.attempt))
            case FinishChoice():
                self._batch.finish_choice(frame)
            case Drain():
                self._saving = self._draining = True
                self._batch.drain()
            case Undrain():
                self._saving = self._draining = False
                self._publisher.drain(False)
            case Start():
                logger.error("a second start frame is ignored")

    def _accept(self, frame: PrefillJob | RunJob) -> None:
        request = frame.request
        key = (request.id, request.attempt)
        latest = self._attempts.get(request.id, request.attempt)
        parked = self._lot.get(key)
        if latest > request.attempt or self._batch.has(key):
            return  # older than what is known, or a duplicate
        if parked is not None:
            if parked.parked.aborted:
                self._fail(key, Unavailable("fetches of this attempt still end; try again"))
            return
        try:
            check_request(request, self._engine.info)
        except BatonError as error:
            self._fail(key, error)
            return
        if latest < request.attempt:
            self._abort((request.id, latest))
        self._attempts[request.id] = request.attempt
        self._attempts.move_to_end(request.id)
        while len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)
        if isinstance(frame, PrefillJob):
            self._start_prefill(frame)
        else:
            self._start_run(frame)

    def _fail(self, key: JobKey, error: BatonError) -> None:
        self._port.send(JobFailed(*key, error.record()))

    def _make_job(self, frame: PrefillJob | RunJob, *, await_first: bool) -> Job:
        request = frame.request
        finished = frozenset(frame.finished if isinstance(frame, RunJob) else ())
        hashes: Sequence[BlockHash] = ()
        cached = 0
        # A prompt whose own likelihood is asked for is computed whole: nothing is waited for.
        if request.params.prompt_logprobs is None:
            hashes = self._engine.block_hashes(request)
            cached = self._engine.cached_blocks(hashes)
        chunks = chunk_hashes(hashes, self._chunk_blocks)
        kind: Literal["prefill", "run"] = "prefill" if isinstance(frame, PrefillJob) else "run"
        self._arrivals += 1
        return Job(
            request=request,
            kind=kind,
            seq=self._arrivals,
            chunks=chunks,
            chunk_blocks=self._chunk_blocks,
            full_blocks=len(hashes),
            block_size=self._engine.info.layout.block_size,
            parked=FetchState(
                len(chunks), self._chunk_blocks, awaits_first=await_first, cached_blocks=cached
            ),
            times=Times(self._clock()),
            priority=Priority.HANDOFF if kind == "run" and await_first else Priority.PREFIX,
            finished=finished,
            open_choices=set(range(request.params.n)) - finished,
        )

    def _start_prefill(self, frame: PrefillJob) -> None:
        # What it waits for here is the lookup's answer: without it nobody knows what to publish,
        # and blocks can be held for a put only right after the step that filled them.
        job = self._make_job(frame, await_first=True)
        job.inbox = (frame.decode_node, frame.decode_epoch)
        self._publisher.open(job)
        if job.chunks:
            job.looking = True
            self._connector.lookup(*job.key, job.chunks)
        self._lot.park(job)
        if not job.chunks:
            self._lot.apply(job, job.parked.know_first())

    def _start_run(self, frame: RunJob) -> None:
        job = self._make_job(frame, await_first=frame.await_first)
        if not frame.await_first and job.parked.missing:
            job.looking = True
            self._connector.lookup(*job.key, job.chunks)
        self._lot.park(job)
        for entry in self._stash.take(job.key):
            self._announced(entry)

    def _first(self, frame: FirstTokens) -> None:
        job = self._lot.get((frame.request, frame.attempt))
        if job is None or job.kind != "run" or job.parked.aborted:
            return
        continued = msgspec.structs.replace(job.request, outputs=frame.outputs)
        try:
            check_request(continued, self._engine.info)
        except BatonError as error:
            self._lot.apply(job, job.parked.abort())
            self._batch.fail(job, error)
            return
        job.request = continued
        job.finished |= frozenset(frame.finished)
        job.open_choices -= job.finished
        job.handed_off = True
        job.times.handed_off = self._clock()
        # With every choice ended at the prefill node nothing is left to run.
        parked = job.parked
        self._lot.apply(job, parked.know_first() if job.open_choices else parked.abort())

    def _end_late_ones(self, now: float) -> None:
        """Nobody waits any more for what is past its deadline."""
        late = [job for job in (*self._lot.jobs(), *self._batch.jobs()) if job.is_late(now)]
        for job in late:
            self._abort(job.key)
            self._fail(job.key, DeadlineExceeded("the request was not finished by its deadline"))

    def _abort(self, key: JobKey) -> None:
        if job := self._lot.get(key):
            self._lot.apply(job, job.parked.abort())
            self._publisher.close(job)
            return
        self._batch.abort(key)

    # --- the connector's events -----------------------------------------------------------------

    def _happened(self, event: ConnectorEvent) -> None:
        match event:
            case LookedUp():
                self._looked_up(event)
            case Fetched():
                job = self._lot.settle(event)
                if job is not None and not event.ok:
                    self._publisher.missing(job, event.chunk.index)
            case Copied():
                self._publisher.copied(event)
            case Published():
                self._publisher.published(event)
            case InboxEntry():
                self._announced(event)

    def _looked_up(self, event: LookedUp) -> None:
        job = self._lot.get((event.request, event.attempt))
        if job is not None:
            job.looking = False
            found = enumerate(event.markers)
            job.markers.update((i, marker) for i, marker in found if marker is not None)
        self._publisher.looked_up(event)
        if job is not None:
            job.decision = self._weigher.weigh(job)
            self._lot.apply(job, job.parked.announce(job.decision.fetch))
            self._lot.apply(job, job.parked.end())
            if job.kind == "prefill":
                self._lot.apply(job, job.parked.know_first())

    def _announced(self, event: InboxEntry) -> None:
        key = (event.request, event.attempt)
        job = self._lot.get(key)
        if job is None:
            if self._attempts.get(event.request, -1) < event.attempt:
                self._stash.put(event)
            return
        if job.kind != "run" or job.parked.over:
            return
        if event.kind != "chunks":
            self._lot.apply(job, job.parked.end())
            return
        for index, marker in enumerate(event.markers, start=event.first):
            job.markers[index] = marker
        mask = ((1 << len(event.markers)) - 1) << event.first
        self._lot.apply(job, job.parked.announce(mask))
