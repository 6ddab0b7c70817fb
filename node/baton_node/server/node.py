"""A running node: connects the engine process, the table of requests and the links to routers.

In: frames from routers and from the engine. Out: frames to both. It keeps what the first frames on
a new link need: the report, the last load, and the chunks in the engine's cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

import msgspec

from baton_node.ipc.engine_process import EngineProcess
from baton_node.ipc.messages import Drained, Profiled, Saved, Slept, Step, ToEngine, ToServer
from baton_node.server.draining import ENDS, Draining, EndWaits
from baton_node.server.identity import Identity
from baton_node.server.links import RouterLink, broadcast
from baton_node.server.load_throttle import LoadThrottle
from baton_node.server.metrics import NodeMetrics
from baton_node.server.profiles import Profiles
from baton_node.server.request_table import RequestTable
from baton_node.server.role import NodeRole, saturation_error
from baton_node.server.sleeping import Sleeping
from baton_node.server.spans import NodeSpans
from baton_node.server.uncounted_jobs import UncountedJobs
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import BlockHash, Epoch
from baton_protocol.link import (
    DRAINED,
    Abort,
    CacheEvents,
    DrainNode,
    FirstTokens,
    Hello,
    JobFailed,
    Load,
    NoFirstTokens,
    PinPrefix,
    PrefillJob,
    ResetPrefixCache,
    ResumeNode,
    Resync,
    RunJob,
    ToNode,
    UnpinPrefix,
)
from baton_protocol.store import NodeReport, NodeState
from baton_protocol.usage import NodeTime, UsageEntry
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
# Jobs that wait in this process while the engine is in a long step. Above this limit new jobs are
# refused. The links are still read: otherwise routers would get no answers to their pings.
MAX_UNREAD_BYTES = 64 << 20

DRAINING = ErrorRecord(
    message="this node is draining and takes no new requests",
    code="draining",
    status=503,
    retryable=True,
)
TAKEN = ErrorRecord(
    message="another router already runs a request with this id here",
    code="request_taken",
    status=409,
)
HANDED_BACK = ErrorRecord(
    message="this node shut down before the request ended",
    code=DRAINED,
    status=503,
    retryable=True,
)
HANDED_BACK_FOR_SLEEP = msgspec.structs.replace(
    HANDED_BACK, message="this node went to sleep before the request ended"
)


class Node:
    """One node whose engine is ready. Belongs to the server's event loop."""

    def __init__(
        self,
        identity: Identity,
        engine: EngineProcess,
        tokenizer: Tokenizer,
        role: NodeRole,
        metrics: NodeMetrics,
        spans: NodeSpans | None = None,
        waits: EndWaits | None = None,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._role = role
        grace_s = identity.settings.link_grace_s
        self._table = RequestTable(tokenizer, self._send, metrics, grace_s, spans=spans)
        self._uncounted = UncountedJobs()
        self._load_throttle = LoadThrottle(self._send_load)
        self._links: set[RouterLink] = set()
        self._chunks: set[BlockHash] = set(identity.ready.chunks)
        self._events = 0  # number of the last CacheEvents frame
        self._drained = asyncio.Event()
        self._waits = waits or EndWaits()
        limit_s, save_s = identity.settings.drain_timeout_s, self._waits.save_s
        self._draining = Draining(engine.send, self._send_load, limit_s, save_s)
        self._used_at = time.monotonic()
        self.sleeping = Sleeping(
            *(engine.send, self._draining, self, self._send_load),
            sleep_s=self._waits.sleep_s,
            wake_s=identity.settings.start_timeout_s,
        )
        self._figures = identity.ready.load
        self._time = NodeTime()
        self.profiles = Profiles(engine.send)

    @property
    def requests(self) -> int:
        """Number of requests and prefill jobs that have not ended."""
        return len(self._table)

    @property
    def epoch(self) -> Epoch:
        return self._identity.epoch

    @property
    def state(self) -> NodeState:
        return self._draining.state

    @property
    def load(self) -> Load:
        """The engine's last load report, plus what only the server knows: the number of requests,
        jobs that the engine has not counted yet, and the drain state."""
        load = msgspec.structs.replace(self._figures.load, requests=self.requests)
        return msgspec.structs.replace(
            self._figures,
            state=self.state,
            load=self._uncounted.add_to_load(load),
            reason=self._draining.reason,
            leaving=self._draining.leaving,
            replaced_by=self._draining.replaced_by,
            asleep=bool(self.sleeping.away),
            wakes=self.sleeping.wakes and not self._draining.is_asked,
        )

    def report(self) -> NodeReport:
        return self._identity.report(self.load)

    def usage(self) -> UsageEntry:
        """Where the engine's time went, for the pool's books."""
        settings = self._identity.settings
        return UsageEntry(
            name=settings.node,
            role=settings.role,
            model=settings.model_name(),
            wall_ms=self._time.wall_ms,
            times=self._time.rows,
        )

    # --- routers --------------------------------------------------------------------------------

    def add_link(self, link: RouterLink) -> None:
        """A router has connected: send it the report, the cached chunks and the load."""
        link.send(Hello(self.report()))
        self._list_chunks(link)
        link.send(self.load)
        self._links.add(link)

    def _list_chunks(self, link: RouterLink) -> None:
        chunks, seq = tuple(self._chunks), self._events
        link.send(CacheEvents(self.epoch, stored=chunks, reset=True, seq=seq))

    def remove_link(self, link: RouterLink) -> None:
        """A link is lost. Its requests are aborted unless their router reconnects within
        `link_grace_s`."""
        self._links.discard(link)
        if self._table.orphan_requests(link):
            grace = self._identity.settings.link_grace_s
            asyncio.get_running_loop().call_later(grace, self._table.drop_expired)

    def handle_router_frame(self, link: RouterLink, frame: ToNode) -> None:
        """Handle a router's frame."""
        match frame:
            case PrefillJob() | RunJob():
                self._job(link, frame)
            case FirstTokens():
                self._table.use_first_tokens(frame, link.router)
            case NoFirstTokens():
                self._table.use_no_first_tokens(frame, link.router)
            case Abort():
                self._table.abort_request(frame, link.router)
            case DrainNode():
                self._draining.begin_drain(frame)
            case ResumeNode():
                self._draining.end_drain()
            case Resync():
                self._list_chunks(link)
            case PinPrefix():
                if self.state == "ready":
                    self._engine.send(frame)
            case ResetPrefixCache() | UnpinPrefix():
                self._engine.send(frame)

    def _job(self, link: RouterLink, job: PrefillJob | RunJob) -> None:
        request, attempt = job.request.id, job.request.attempt
        taken = self._table.is_anothers(request, link.router)
        if not taken and self._table.resume_job(job, link):
            return
        refusal = TAKEN if taken else self._refusal(job)
        if refusal is not None:
            about = {"request": request, "attempt": attempt}
            logger.info("refused: %s", refusal.code, extra=about)
            link.send(JobFailed(request, attempt, refusal))
            return
        self._table.open_request(job, link)
        self.note_use()
        if len(self._links) > 1:  # tell other routers; the sender has booked the job itself
            self._load_throttle.request_load()

    def _send(self, frame: ToEngine) -> None:
        if isinstance(frame, PrefillJob | RunJob):
            self._uncounted.add_job(frame)
        self._engine.send(frame)

    def _refusal(self, job: PrefillJob | RunJob) -> ErrorRecord | None:
        if self.state == "draining":
            return DRAINING
        if (unread := self._engine.unread_bytes) > MAX_UNREAD_BYTES:
            return saturation_error(
                f"{unread} bytes of jobs already wait for this node's engine", retry_after=1.0
            )
        return self._role.refuse(job, self.load)

    # --- the engine -----------------------------------------------------------------------------

    async def follow_engine(self) -> None:
        """Handle the engine's frames until the engine ends, which raises EngineLost."""
        while True:
            self.handle_engine_frame(await self._engine.next_frame())

    def handle_engine_frame(self, frame: ToServer) -> None:
        """Handle a frame from the engine."""
        match frame:
            case Step():
                self._table.send_step(frame)
            case JobFailed():
                self._table.fail_request(frame)
            case Load():
                self._figures = frame
                if self.requests:
                    self.note_use()
                self._uncounted.drop_counted(frame.load.jobs_total)
                self._send_load()
                self._table.drop_expired()
            case CacheEvents():
                self._chunks.update(frame.stored)
                self._chunks.difference_update(frame.evicted)
                self._events += 1
                broadcast(self._links, msgspec.structs.replace(frame, seq=self._events))
            case NodeTime():
                self._time = frame
            case Saved():
                self._draining.note_saved()
            case Drained():
                self._drained.set()
            case Profiled():
                self.profiles.note(frame)
            case Slept():
                self.sleeping.take_answer(frame)

    def _send_load(self) -> None:
        self._load_throttle.note_sent()
        broadcast(self._links, self.load)

    # --- shutdown and sleep ---------------------------------------------------------------------

    async def drain(self, reason: str = ENDS) -> None:
        """Refuse new jobs for good and return when no request is left here.

        Requests finish before the drain deadline, or routers move them after it. Those that are
        still here EndWaits.move_s later are returned to their routers.
        """
        self._drained.clear()
        self._draining.begin_shutdown(reason)
        await self._let_requests_leave()
        self._draining.cancel_timer()
        self._table.hand_back_requests(HANDED_BACK)
        try:
            async with asyncio.timeout(self._waits.publish_s):
                await self._drained.wait()
        except TimeoutError:
            logger.warning("shutting down before the store has accepted all chunks")

    def idle_s(self) -> float:
        """Seconds since a request was here, or since the start, or the end of a sleep."""
        return 0.0 if self.requests else time.monotonic() - self._used_at

    def note_use(self) -> None:
        self._used_at = time.monotonic()

    def hand_back(self) -> None:
        self._table.hand_back_requests(HANDED_BACK_FOR_SLEEP)

    async def leave(self) -> bool:
        await self._let_requests_leave()
        return not self.requests

    async def _let_requests_leave(self) -> None:
        """Wait until no request is here, or EndWaits.move_s after routers were asked to move
        them."""
        while self.requests and not self._draining.leaving:
            await asyncio.sleep(DRAIN_POLL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._waits.move_s):
                while self.requests:
                    await asyncio.sleep(DRAIN_POLL_S)

    async def close_links(self) -> None:
        """Close all links in parallel, so that a router that does not read delays no other."""
        await asyncio.gather(*(self._close(link) for link in list(self._links)))

    async def _close(self, link: RouterLink) -> None:
        await link.flush()
        await link.close()

    def lose_links(self) -> None:
        """Drop the remaining links without waiting for their queues, and a profile's file."""
        self.profiles.close()
        self._load_throttle.cancel_timer()
        for link in self._links:
            link.lose()
