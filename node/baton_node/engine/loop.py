"""The step loop: the thread that owns the engine and makes all decisions of the engine process.

One iteration handles the server's frames, compiled grammars and the connector's events, checks
timers, reserves blocks for parked requests, runs one engine step, and sends its results and the due
reports. An idle loop sleeps in select() on the server's socket and the file descriptors of the
connector and of the grammars' worker.

In: PrefillJob, RunJob, FirstTokens, NoFirstTokens, Abort, FinishChoice, Drain, Undrain; chunks and
inbox entries. Out: Step, JobFailed, Load, CacheEvents, Saved, Drained; chunks and inbox entries.
"""

from __future__ import annotations

import logging
import select
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import msgspec

from baton_node.engine.grammars import CompilingJob, CompilingJobs
from baton_node.engine.job import Job, JobKey, Times, check_request
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.engine.reporter import Reporter
from baton_node.engine.roles import Fetching, Publishing, WritingBehind
from baton_node.engine.running_batch import RunningBatch
from baton_node.ipc.messages import (
    Drain,
    Drained,
    FinishChoice,
    Saved,
    Start,
    ToEngine,
    Undrain,
)
from baton_node.store.base import ConnectorEvent, Copied, Fetched, LookedUp, Published
from baton_protocol.errors import BatonError, DeadlineExceeded, Unavailable
from baton_protocol.hashing import chunk_hashes
from baton_protocol.ids import BlockHash, RequestId
from baton_protocol.link import (
    Abort,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PrefillJob,
    RunJob,
)
from baton_protocol.store import InboxEntry

logger = logging.getLogger(__name__)
IDLE_S = 0.2  # the longest single select()
STUCK_S = 0.002  # pause after a step that could run nothing, until blocks are free again
PAUSE_S = 2.0  # time without a shortage until parked requests get blocks again
REMEMBERED = 4096  # number of requests whose latest attempt is remembered
# Interval between checks of all deadlines; a check of 4,096 requests takes 0.4 ms.
EXPIRE_EVERY_S = 0.1


class EngineLoop:
    """The step loop. Belongs to one thread. It leaves fetching, publishing and write-behind to the
    roles' objects."""

    def __init__(
        self,
        context: LoopContext,
        batch: RunningBatch,
        fetching: Fetching,
        publishing: Publishing,
        write_behind: WritingBehind,
        outgoing: OutgoingBlocks,
        compiling: CompilingJobs,
    ) -> None:
        self._engine = context.engine
        self._connector = context.connector
        self._socket = context.socket
        self._clock = context.clock
        self._layout = context.layout
        self.counters = context.counters
        self._batch = batch
        self._fetching = fetching
        self._publishing = publishing
        self._write_behind = write_behind
        self._outgoing = outgoing
        self._compiling = compiling
        self._reporter = Reporter(context, self)
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()
        self._arrivals = 0
        self._ended = 0
        # When blocks last were short. While set, parked requests get no blocks.
        self._short_at: float | None = None
        self._next_expiry = 0.0
        self._saving = self._draining = False  # a Drain is not answered yet by Saved, by Drained

    @property
    def idle(self) -> bool:
        """True when there are no requests, and no put or fetch for one is in flight."""
        nothing_goes_out = self._publishing.empty and self._write_behind.empty
        nothing_goes_out = nothing_goes_out and not self._outgoing.copying
        return nothing_goes_out and not self._compiling and self._fetching.empty and not self._batch

    @property
    def stamp(self) -> tuple[float, ...]:
        """Changes whenever a request arrives, is admitted, has its prompt computed, or ends."""
        batch, waiting = self._batch, (len(self._compiling), len(self._fetching))
        return self.counters["jobs"], *waiting, len(batch), batch.ended, batch.prompted

    @property
    def parked(self) -> int:
        """Number of parked sequences, including those whose grammar is being compiled."""
        return self._compiling.sequences + self._fetching.sequences

    @property
    def parked_tokens(self) -> int:
        return self._compiling.tokens + self._fetching.tokens

    @property
    def early_entries(self) -> int:
        """Number of inbox entries that wait for their job."""
        return self._fetching.early_entries

    def run(self) -> None:
        """Run the loop until the server is gone, which raises EngineSocketClosed."""
        stuck = False
        while True:
            self._sleep(stuck)
            stuck = not self.turn()

    def turn(self) -> bool:
        """Run one iteration, without sleeping. Return False if the engine has work and could run
        nothing."""
        for frame in self._socket.receive():
            self._take(frame)
        for compiled in self._compiling.ready():
            self._go_on(compiled)
        for event in self._connector.poll():
            self._happened(event)
        now = self._clock()
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRE_EVERY_S
            self._end_late_ones(now)
        self._fetching.expire(now)
        if self._short_at is None:
            self._fetching.grant()
        moved = self._batch.step() if self._engine.has_work() else True
        self._share_blocks()
        for report in self._reporter.due(self._clock()):
            self._socket.send(report)
        self._answer_drain()
        return moved

    def _answer_drain(self) -> None:
        if self._saving and self._write_behind.saved:
            self._saving = False
            self._socket.send(Saved())
        if self._draining and self.idle:
            self._draining = False
            self._socket.send(Drained())

    def _share_blocks(self) -> None:
        """If the running batch lacks blocks, make a parked request release its own. Parked requests
        get blocks again when a request has ended, or after PAUSE_S without a shortage."""
        now = self._clock()
        if self._engine.has_work() and self._engine.starved():
            self._short_at = now
            self._fetching.give_back()
        elif self._short_at is not None:
            freed = self._batch.ended != self._ended or not self._engine.has_work()
            if freed or now >= self._short_at + PAUSE_S:
                self._short_at = None
        self._ended = self._batch.ended

    def _sleep(self, stuck: bool) -> None:
        if self._engine.has_work():
            timeout = STUCK_S if stuck else 0.0
        else:
            report = self._reporter.next_due
            due = min(report, self._fetching.next_deadline() or report)
            timeout = min(IDLE_S, max(0.0, due - self._clock()))
        if timeout > 0.0:
            sources = (self._socket, self._connector, self._compiling)
            select.select([source.fileno() for source in sources], [], [], timeout)

    # --- the server's frames --------------------------------------------------------------------

    def _take(self, frame: ToEngine) -> None:
        match frame:
            case PrefillJob() | RunJob():
                self.counters.add(jobs=1)
                self._accept(frame)
            case FirstTokens() | NoFirstTokens() | FinishChoice() if self._compiling.follow(frame):
                pass  # handled after its job, which waits for its grammar
            case FirstTokens():
                self._first(frame)
            case NoFirstTokens():
                job = self._fetching.get((frame.request, frame.attempt))
                if job is not None and job.kind == "run":
                    job.times.handed_off = self._clock()
                    self._fetching.know_first(job)
            case Abort():
                self._abort((frame.request, frame.attempt))
            case FinishChoice():
                self._batch.finish_choice(frame)
            case Drain():
                self._saving = self._draining = True
                self._batch.drain()
            case Undrain():
                self._saving = self._draining = False
                self._write_behind.drain(False)
            case Start():
                logger.error("ignoring a second start frame")

    def _accept(self, frame: PrefillJob | RunJob) -> None:
        request = frame.request
        key = (request.id, request.attempt)
        latest = self._attempts.get(request.id, request.attempt)
        is_here = self._batch.has(key) or self._fetching.get(key) is not None
        is_here = is_here or self._compiling.has(key)
        if latest > request.attempt or is_here:
            return  # an older attempt, or a duplicate
        if self._fetching.is_settling(key):
            self._fail(key, Unavailable("fetches of this attempt are still ending; try again"))
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
        self._start(frame)

    def _fail(self, key: JobKey, error: BatonError) -> None:
        self._socket.send(JobFailed(*key, error.record()))

    def _start(self, frame: PrefillJob | RunJob) -> None:
        request = frame.request
        hashes: Sequence[BlockHash] = ()
        # A request for prompt logprobs computes its whole prompt, so it looks up no chunks.
        if request.params.prompt_logprobs is None:
            hashes = self._engine.block_hashes(request)
        finished = frozenset(frame.finished if isinstance(frame, RunJob) else ())
        kind: Literal["prefill", "run"] = "prefill" if isinstance(frame, PrefillJob) else "run"
        self._arrivals += 1
        job = Job(
            request=request,
            kind=kind,
            seq=self._arrivals,
            layout=self._layout,
            chunks=chunk_hashes(hashes, self._layout.chunk_blocks),
            full_blocks=len(hashes),
            times=Times(self._clock()),
            finished=finished,
            open_choices=set(range(request.params.n)) - finished,
        )
        structured = request.params.structured
        if structured is not None:
            job.matcher = self._compiling.known(structured.grammar)
            if job.matcher is None:
                uncached = self._uncached(job, frame, hashes)
                waiting = CompilingJob(job, frame, structured.grammar, hashes, uncached)
                self._compiling.request(waiting)
                return
        self._park(job, frame, hashes)

    def _uncached(self, job: Job, frame: PrefillJob | RunJob, hashes: Sequence[BlockHash]) -> int:
        """Return the number of tokens that the job will compute on this node, as far as known. 0
        while a prefill node computes its prompt."""
        if isinstance(frame, RunJob) and frame.await_first:
            return 0
        cached = self._engine.cached_blocks(hashes) * self._layout.block_size
        return max(0, max(map(job.given, job.open_choices), default=0) - cached)

    def _go_on(self, compiled: CompilingJob) -> None:
        """Continue with a job whose grammar is compiled, and with the frames that waited behind it.
        Fail the job if compilation failed."""
        if compiled.error is not None:
            self._fail(compiled.job.key, compiled.error)
            return
        compiled.job.matcher = compiled.matcher
        self._park(compiled.job, compiled.frame, compiled.hashes)
        for frame in compiled.behind:
            self._take(frame)

    def _park(self, job: Job, frame: PrefillJob | RunJob, hashes: Sequence[BlockHash]) -> None:
        if isinstance(frame, PrefillJob):
            job.inbox = (frame.decode_node, frame.decode_epoch)
            self._publishing.open(job)
        await_first = isinstance(frame, RunJob) and frame.await_first
        cached = self._engine.cached_blocks(hashes)
        self._fetching.park(job, cached_blocks=cached, await_first=await_first)

    def _first(self, frame: FirstTokens) -> None:
        job = self._fetching.get((frame.request, frame.attempt))
        if job is None or job.kind != "run":
            return
        continued = msgspec.structs.replace(job.request, outputs=frame.outputs)
        try:
            check_request(continued, self._engine.info)
        except BatonError as error:
            self._fetching.abort(job)
            self._batch.fail(job, error)
            return
        job.request = continued
        job.finished |= frozenset(frame.finished)
        job.open_choices -= job.finished
        job.handed_off = True
        job.times.handed_off = self._clock()
        if job.open_choices:
            self._fetching.know_first(job)
        else:  # every choice ended on the prefill node, so there is nothing to run
            self._fetching.abort(job)

    def _end_late_ones(self, now: float) -> None:
        """Abort and fail the jobs whose deadline has passed."""
        jobs = (*self._compiling.jobs(), *self._fetching.jobs(), *self._batch.jobs())
        for job in [job for job in jobs if job.is_late(now)]:
            self._abort(job.key)
            self._fail(job.key, DeadlineExceeded("the request did not finish by its deadline"))

    def _abort(self, key: JobKey) -> None:
        if self._compiling.drop(key):
            return
        if job := self._fetching.get(key):
            self._fetching.abort(job)
            self._batch.close(job)
        else:
            self._batch.abort(key)

    # --- the connector's events -----------------------------------------------------------------

    def _happened(self, event: ConnectorEvent) -> None:
        match event:
            case LookedUp():
                self._looked_up(event)
            case Fetched():
                job = self._fetching.fetched(event)
                if job is not None and not event.ok:
                    self._publishing.missing(job, event.chunk.index)
            case Copied():
                self._outgoing.copied(event)
                self._write_behind.copied(event)
            case Published():
                self._outgoing.published(event)
                self._write_behind.published(event)
                self._publishing.published(event)
            case InboxEntry():
                is_early = self._attempts.get(event.request, -1) < event.attempt
                # A job that waits for its grammar gets these entries when it is parked.
                is_early = is_early or self._compiling.has((event.request, event.attempt))
                self._fetching.announced(event, is_early=is_early)

    def _looked_up(self, event: LookedUp) -> None:
        job = self._fetching.get((event.request, event.attempt))
        if job is not None:
            found = enumerate(event.markers)
            job.markers.update((i, marker) for i, marker in found if marker is not None)
        self._publishing.looked_up(event)
        if job is not None:
            self._fetching.looked_up(job)
