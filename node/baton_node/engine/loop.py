"""The step loop: the thread that owns the engine and makes all decisions of the engine process.

One iteration handles the server's frames, compiled grammars and the connector's events, checks
timers, reserves blocks for parked requests, runs one engine step, and sends its results and the due
reports. An idle loop sleeps in select() on the server's socket and the file descriptors of the
connector and of the grammars' worker.

In: PrefillJob, RunJob, FirstTokens, NoFirstTokens, Abort, FinishChoice, Drain, Undrain,
ResetPrefixCache, PinPrefix, UnpinPrefix, StartProfile, StopProfile, Sleep, WakeUp; chunks and inbox
entries. Out: Step, JobFailed, Load, CacheEvents, NodeTime, Saved, Drained, Profiled, Slept; chunks
and inbox entries.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Sequence
from typing import Any

import msgspec

from baton_engine.errors import EngineError
from baton_node.engine.grammar_compiler import CompiledGrammar, GrammarCompiler
from baton_node.engine.job import Job, JobKey, JobKind, LaterFrame, Times
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.outgoing_blocks import OutgoingBlocks
from baton_node.engine.prefix_pins import PrefixPins
from baton_node.engine.reporter import Reporter
from baton_node.engine.request_check import check_request
from baton_node.engine.roles import Fetching, Publishing, WritingBehind
from baton_node.engine.running_batch import RunningBatch
from baton_node.engine.step_profiler import StepProfiler
from baton_node.ipc.messages import (
    Drain,
    Drained,
    FinishChoice,
    Saved,
    Sleep,
    Slept,
    Start,
    StartProfile,
    StopProfile,
    ToEngine,
    Undrain,
    WakeUp,
)
from baton_node.store.base import (
    ChunkCopied,
    ChunkFetched,
    ChunkPublished,
    ChunksLookedUp,
    ConnectorEvent,
)
from baton_protocol.errors import BatonError, DeadlineExceeded, Unavailable
from baton_protocol.hashing import chunk_hashes
from baton_protocol.ids import BlockHash
from baton_protocol.link import (
    Abort,
    FirstTokens,
    JobFailed,
    NoFirstTokens,
    PinPrefix,
    PrefillJob,
    ResetPrefixCache,
    RunJob,
    UnpinPrefix,
)
from baton_protocol.request import Request
from baton_protocol.store import InboxEntry

logger = logging.getLogger(__name__)
IDLE_S = 0.2  # the longest single select()
STUCK_S = 0.002  # pause after a step that could run nothing, until blocks are free again
PAUSE_S = 2.0  # time without a shortage until parked jobs get blocks again
# Interval between checks of all deadlines; a check of 4,096 requests takes 0.4 ms.
EXPIRE_EVERY_S = 0.1


class EngineLoop:
    """The step loop. Belongs to one thread. It owns the table of jobs; fetching, publishing and
    write-behind belong to the roles' objects."""

    def __init__(
        self,
        context: LoopContext,
        batch: RunningBatch,
        fetching: Fetching,
        publishing: Publishing,
        write_behind: WritingBehind,
        outgoing: OutgoingBlocks,
        compiler: GrammarCompiler,
    ) -> None:
        self._engine = context.engine
        self._connector = context.connector
        self._socket = context.socket
        self._clock = context.clock
        self._layout = context.layout
        self._jobs = context.jobs
        self.counters = context.counters
        self._batch = batch
        self._fetching = fetching
        self._publishing = publishing
        self._write_behind = write_behind
        self._outgoing = outgoing
        self._compiler = compiler
        self._ledger = context.ledger
        self._pins = PrefixPins(context, publishing, self._start_prefix, self._abort)
        self._reporter = Reporter(context, fetching, self._pins)
        self._profiler = StepProfiler(context.engine.info, context.socket.send)
        self._arrivals = 0
        self._freed = 0
        # When blocks last were short. While set, parked jobs get no blocks.
        self._short_at: float | None = None
        self._next_expiry = 0.0
        self._saving = self._draining = False  # a Drain is not answered yet by Saved, by Drained
        self._to_sleep: Sleep | None = None  # not obeyed yet

    @property
    def idle(self) -> bool:
        """True when there are no jobs, and no put or fetch for one is in flight."""
        nothing_moves = self._outgoing.empty and self._publishing.empty and self._fetching.empty
        return nothing_moves and not self._jobs

    @property
    def early_entries(self) -> int:
        """Number of inbox entries that wait for their job."""
        return self._fetching.early_entries

    def run(self) -> None:
        """Run the loop until the server is gone, which raises EngineSocketClosed."""
        stuck = False
        while True:
            self._wait(stuck)
            stuck = not self.turn()

    def turn(self) -> bool:
        """Run one iteration, without sleeping. Return False if the engine has work and could run
        nothing."""
        if not self._engine.has_work():
            self._ledger.book_idle()
        for frame in self._socket.receive():
            self._handle_frame(frame)
        for compiled in self._compiler.take_compiled():
            self._use_grammar(compiled)
        for event in self._connector.poll():
            self._handle_event(event)
        now = self._clock()
        if now >= self._next_expiry:
            self._next_expiry = now + EXPIRE_EVERY_S
            self._fail_late_jobs(now)
            self._pins.expire()
        self._fetching.expire_waits(now)
        if self._short_at is None:
            self._fetching.grant_blocks()
        works = self._engine.has_work()
        moved = self._batch.run_step() if works else True
        self._pins.settle()
        self._profiler.turn(stepped=works and moved)
        self._share_blocks()
        for report in self._reporter.take_due(self._clock()):
            self._socket.send(report)
        self._answer_drain()
        return moved

    def _answer_drain(self) -> None:
        if self._saving and self._write_behind.saved:
            self._saving = False
            self._socket.send(Saved())
        if self._draining and self.idle:
            self._draining = False
            self._socket.send(self._ledger.report())  # the last one, if the node ends
            self._socket.send(Drained())
        if self._to_sleep is not None and self.idle:
            self._sleep_now(self._to_sleep)

    def _sleep_now(self, frame: Sleep) -> None:
        """Nothing is in flight. The next reports say which chunks left the cache."""
        self._to_sleep = None
        error = ""
        try:
            self._engine.sleep(frame.level)
            self._pins.forget_all()
        except EngineError as failure:
            error = str(failure)
        self._ledger.book_idle()
        self._socket.send(Slept(self._engine.away, error))

    def _wake_up(self, frame: WakeUp) -> None:
        self._to_sleep = None
        before, error, changed = self._engine.info.fingerprint, "", False
        try:
            self._engine.wake_up(frame.parts)
            changed = self._engine.info.fingerprint != before
            if changed:  # the store's connector has the chunks of the old weights
                self._engine.sleep(2)
        except EngineError as failure:
            error = str(failure)
        self._ledger.book_idle()
        self._socket.send(Slept(self._engine.away, error, changed))

    def _share_blocks(self) -> None:
        """If the running batch lacks blocks, make a parked job release its own. Parked jobs get
        blocks again when a running one has ended, or after PAUSE_S without a shortage."""
        now = self._clock()
        if self._engine.has_work() and self._engine.starved():
            self._short_at = now
            self._fetching.give_blocks_back()
        elif self._short_at is not None:
            freed = self._jobs.freed != self._freed or not self._engine.has_work()
            if freed or now >= self._short_at + PAUSE_S:
                self._short_at = None
        self._freed = self._jobs.freed

    def _wait(self, stuck: bool) -> None:
        if self._engine.has_work():
            timeout = STUCK_S if stuck else 0.0
        else:
            report = self._reporter.next_due
            due = min(report, self._fetching.next_deadline() or report)
            timeout = min(IDLE_S, max(0.0, due - self._clock()))
        if timeout > 0.0:
            sources = (self._socket, self._connector, self._compiler)
            select.select([source.fileno() for source in sources], [], [], timeout)

    # --- the server's frames --------------------------------------------------------------------

    def _handle_frame(self, frame: ToEngine) -> None:
        match frame:
            case PrefillJob() | RunJob():
                self.counters.add(jobs=1)
                self._jobs.changes += 1
                self._accept_job(frame)
            case FirstTokens() | NoFirstTokens() | FinishChoice():
                self._continue_job(frame)
            case Abort():
                self._abort_job((frame.request, frame.attempt))
            case Drain():
                self._saving = self._draining = True
                self._pins.stop_loading()
                self._batch.start_draining()
            case Undrain():
                self._saving = self._draining = False
                self._write_behind.set_draining(False)
            case ResetPrefixCache():
                self._pins.forget_all()
                self._engine.reset_prefix_cache()
            case PinPrefix():
                if not self._engine.is_sleeping:
                    self._pins.pin(frame)
            case UnpinPrefix():
                self._pins.unpin(frame.id)
            case StartProfile():
                self._profiler.start(frame)
            case StopProfile():
                self._profiler.stop()
            case Sleep():
                self._to_sleep = frame
            case WakeUp():
                self._wake_up(frame)
            case Start():
                logger.error("ignoring a second start frame")

    def _accept_job(self, frame: PrefillJob | RunJob) -> None:
        request = frame.request
        key = (request.id, request.attempt)
        newest = self._jobs.newest_attempt(request.id)
        if newest > request.attempt or self._jobs.find(key) is not None:
            return  # an older attempt, or a duplicate
        if self._fetching.is_settling(key):
            self._send_failure(
                key, Unavailable("fetches of this attempt are still ending; try again")
            )
            return
        if self._engine.is_sleeping:
            self._send_failure(key, Unavailable("this node is asleep"))
            return
        try:
            check_request(request, self._engine.info)
        except BatonError as error:
            self._send_failure(key, error)
            return
        self._abort_job((request.id, newest))
        self._start_job(frame)

    def _send_failure(self, key: JobKey, error: BatonError) -> None:
        self._socket.send(JobFailed(*key, error.record()))

    def _start_job(self, frame: PrefillJob | RunJob) -> None:
        request = frame.request
        hashes: Sequence[BlockHash] = ()
        # A request that computes its whole prompt looks up no chunks, nor does one for a vector,
        # whose chunks nobody stores.
        if not request.params.reads_no_cache and request.pooling is None:
            hashes = self._engine.block_hashes(request)
        finished = frozenset(frame.finished if isinstance(frame, RunJob) else ())
        inbox = None
        if isinstance(frame, PrefillJob):
            inbox = (frame.decode_node, frame.decode_epoch)
        job = self._make_job(
            request,
            hashes,
            kind="run" if isinstance(frame, RunJob) else "prefill",
            await_first=isinstance(frame, RunJob) and frame.await_first,
            inbox=inbox,
            finished=finished,
        )
        structured = request.params.structured
        if structured is not None:
            job.matcher = self._compiler.find_matcher(structured.grammar)
            if job.matcher is None:
                job.hashes, job.uncached = hashes, self._count_uncached(job, hashes)
                self._jobs.add_job(job, "compiling")
                self._compiler.compile_for(job, structured.grammar)
                return
        self._jobs.add_job(job, "parked")
        self._park_job(job, hashes)

    def _start_prefix(self, request: Request, kept_until: int) -> Job:
        """Begin a job that computes a prefix and, if the node has a store, puts it there."""
        hashes = self._engine.block_hashes(request)
        kind: JobKind = "prefill" if self._connector.store_health() != "none" else "run"
        job = self._make_job(request, hashes, kind=kind, kept_until=kept_until)
        self._jobs.add_job(job, "parked")
        self._park_job(job, hashes)
        return job

    def _make_job(
        self,
        request: Request,
        hashes: Sequence[BlockHash],
        *,
        kind: JobKind,
        finished: frozenset[int] = frozenset(),
        **more: Any,
    ) -> Job:
        """The job of a request that has arrived. `more` are fields of Job."""
        self._arrivals += 1
        return Job(
            request=request,
            kind=kind,
            seq=self._arrivals,
            layout=self._layout,
            chunks=chunk_hashes(hashes, self._layout.chunk_blocks),
            full_blocks=len(hashes),
            times=Times(self._clock()),
            finished=finished,
            open_choices=set(range(request.params.n)) - finished,
            account=self._ledger.open_account(request.tenant),
            **more,
        )

    def _count_uncached(self, job: Job, hashes: Sequence[BlockHash]) -> int:
        """Return the number of tokens that the job will compute on this node, as far as known. 0
        while a prefill node computes its prompt."""
        if job.await_first:
            return 0
        cached = self._engine.cached_blocks(hashes) * self._layout.block_size
        return max(0, max(map(job.known_tokens, job.open_choices), default=0) - cached)

    def _use_grammar(self, compiled: CompiledGrammar) -> None:
        """Continue with a job whose grammar is compiled, and with the frames that waited behind it.
        Fail the job if compilation failed."""
        job = compiled.job
        if isinstance(compiled.matcher, BatonError):
            self._batch.fail_job(job, compiled.matcher)
            return
        job.matcher = compiled.matcher
        self._jobs.set_state(job, "parked")
        hashes, job.hashes = job.hashes, ()
        self._park_job(job, hashes)
        frames, job.later_frames = job.later_frames, []
        for frame in frames:
            self._continue_job(frame)

    def _park_job(self, job: Job, hashes: Sequence[BlockHash]) -> None:
        if job.kind == "prefill":
            self._publishing.open_job(job)
        self._fetching.park_job(job, self._engine.cached_blocks(hashes))

    def _continue_job(self, frame: LaterFrame) -> None:
        job = self._jobs.find((frame.request, frame.attempt))
        if job is None:
            return
        if job.state == "compiling":
            job.later_frames.append(frame)
        elif isinstance(frame, FinishChoice):
            if job.state == "running":
                self._batch.finish_choice(job, frame.choice)
        elif job.state == "parked" and job.kind == "run":
            job.times.handed_off = self._clock()
            if isinstance(frame, FirstTokens):
                self._use_first_tokens(job, frame)
            else:
                self._fetching.know_first(job)

    def _use_first_tokens(self, job: Job, frame: FirstTokens) -> None:
        continued = msgspec.structs.replace(job.request, outputs=frame.outputs)
        try:
            check_request(continued, self._engine.info)
        except BatonError as error:
            self._fetching.abort_job(job)
            self._batch.fail_job(job, error)
            return
        job.request = continued
        job.finished |= frozenset(frame.finished)
        job.open_choices -= job.finished
        job.handed_off = True
        if job.open_choices:
            self._fetching.know_first(job)
        else:  # every choice ended on the prefill node, so there is nothing to run
            self._abort_job(job.key)

    def _fail_late_jobs(self, now: float) -> None:
        """Abort and fail the jobs whose deadline has passed."""
        for job in [job for job in self._jobs if job.is_late(now)]:
            self._abort_job(job.key)
            self._send_failure(
                job.key, DeadlineExceeded("the request did not finish by its deadline")
            )

    def _abort_job(self, key: JobKey) -> None:
        job = self._jobs.find(key)
        if job is not None:
            self._abort(job)

    def _abort(self, job: Job) -> None:
        if job.state == "parked":
            self._fetching.abort_job(job)
        elif job.state == "running":
            self._engine.abort(job.request.id)
        self._batch.end_job(job)

    # --- the connector's events -----------------------------------------------------------------

    def _handle_event(self, event: ConnectorEvent) -> None:
        match event:
            case ChunksLookedUp():
                self._use_lookup(event)
            case ChunkFetched():
                job = self._fetching.settle_fetch(event)
                if job is not None and not event.ok:
                    self._publishing.put_again(job, event.chunk.index)
            case ChunkCopied():
                self._outgoing.release_copied(event)
            case ChunkPublished():
                self._outgoing.settle_put(event)
            case InboxEntry():
                key = (event.request, event.attempt)
                is_early = self._jobs.newest_attempt(event.request) < event.attempt
                # A job that waits for its grammar gets these entries when it is parked.
                is_early = is_early or self._jobs.find(key, "compiling") is not None
                self._fetching.use_announcement(event, is_early=is_early)

    def _use_lookup(self, event: ChunksLookedUp) -> None:
        """Ignore the answer if the job did not wait for it."""
        job = self._jobs.find((event.request, event.attempt), "parked")
        if job is not None:
            markers = enumerate(event.markers)
            job.markers.update((i, marker) for i, marker in markers if marker is not None)
            self._publishing.use_lookup(job)
            self._fetching.use_lookup(job)
