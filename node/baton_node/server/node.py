"""One node in service: engine process, table of requests and links, put together.

In: frames of routers and of the engine, the process's end. Out: frames to both. Holds what a link's
first frames need: the report, the last load, the chunks in the engine's cache.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgspec

from baton_node.ipc.engine_process import EngineProcess
from baton_node.ipc.messages import Drained, Saved, Step, ToEngine, ToServer
from baton_node.server.draining import Draining, EndWaits
from baton_node.server.identity import Identity
from baton_node.server.links import RouterLink, broadcast
from baton_node.server.metrics import NodeMetrics
from baton_node.server.request_table import RequestTable
from baton_node.server.role import NodeRole, saturated
from baton_node.server.spans import NodeSpans
from baton_node.server.unacknowledged_jobs import Soon, UnacknowledgedJobs
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
    PrefillJob,
    ResumeNode,
    Resync,
    RunJob,
    ToNode,
)
from baton_protocol.store import NodeReport, NodeState
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
# Jobs for an engine in a long step wait in this process: a link is read whatever the engine does,
# or its router would miss the answers to its pings.
MAX_UNREAD_BYTES = 64 << 20

DRAINING = ErrorRecord(
    message="this node is draining and takes nothing new",
    code="draining",
    status=503,
    retryable=True,
)
TAKEN = ErrorRecord(
    message="another router has a request of this id here",
    code="request_taken",
    status=409,
)
HANDED_BACK = ErrorRecord(
    message="this node has ended before the request",
    code=DRAINED,
    status=503,
    retryable=True,
)


class Node:
    """Lives in the server's event loop."""

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
        self._unacknowledged = UnacknowledgedJobs()
        self._soon = Soon(self._say_load)
        self._links: set[RouterLink] = set()
        self._chunks: set[BlockHash] = set(identity.ready.chunks)
        self._events = 0  # frames of cache events so far
        self._drained = asyncio.Event()
        self._waits = waits or EndWaits()
        limit_s, save_s = identity.settings.drain_s, self._waits.save_s
        self._draining = Draining(engine.send, self._say_load, limit_s, save_s)
        ready = identity.ready
        self._figures = Load(identity.epoch, "ready", ready.speeds, ready.load, ready.store)

    @property
    def requests(self) -> int:
        """Requests whose last token was not sent yet."""
        return len(self._table)

    @property
    def epoch(self) -> Epoch:
        return self._identity.epoch

    @property
    def state(self) -> NodeState:
        return self._draining.state

    @property
    def load(self) -> Load:
        """What the engine said last, and what only the server knows."""
        known = msgspec.structs.replace(self._figures.load, requests=self.requests)
        return msgspec.structs.replace(
            self._figures,
            state=self.state,
            load=self._unacknowledged.added_to(known),
            reason=self._draining.reason,
            leaving=self._draining.leaving,
            replaced_by=self._draining.replaced_by,
        )

    def report(self) -> NodeReport:
        return self._identity.report(self.load)

    # --- routers --------------------------------------------------------------------------------

    def joined(self, link: RouterLink) -> None:
        """A link opens with who we are and what we hold."""
        link.send(Hello(self.report()))
        self._list_chunks(link)
        link.send(self.load)
        self._links.add(link)

    def _list_chunks(self, link: RouterLink) -> None:
        chunks, seq = tuple(self._chunks), self._events
        link.send(CacheEvents(self.epoch, stored=chunks, reset=True, seq=seq))

    def left(self, link: RouterLink) -> None:
        """A link is gone; its requests have `link_grace_s` to be claimed."""
        self._links.discard(link)
        if self._table.orphan(link):
            grace = self._identity.settings.link_grace_s
            asyncio.get_running_loop().call_later(grace, self._table.tidy)

    def heard(self, link: RouterLink, frame: ToNode) -> None:
        """A router's frame."""
        match frame:
            case PrefillJob() | RunJob():
                self._job(link, frame)
            case FirstTokens():
                self._table.first(frame, link.router)
            case NoFirstTokens():
                self._table.no_first(frame, link.router)
            case Abort():
                self._table.abort(frame, link.router)
            case DrainNode():
                self._draining.drain(frame)
            case ResumeNode():
                self._draining.resume()
            case Resync():
                self._list_chunks(link)

    def _job(self, link: RouterLink, job: PrefillJob | RunJob) -> None:
        request, attempt = job.request.id, job.request.attempt
        taken = self._table.is_anothers(request, link.router)
        if not taken and self._table.goes_on(job, link):
            return
        refusal = TAKEN if taken else self._refusal(job)
        if refusal is not None:
            about = {"request": request, "attempt": attempt}
            logger.info("refused: %s", refusal.code, extra=about)
            link.send(JobFailed(request, attempt, refusal))
            return
        self._table.open(job, link)
        if len(self._links) > 1:  # the router that sent it knows
            self._soon.changed()

    def _send(self, frame: ToEngine) -> None:
        if isinstance(frame, PrefillJob | RunJob):
            self._unacknowledged.given(frame)
        self._engine.send(frame)

    def _refusal(self, job: PrefillJob | RunJob) -> ErrorRecord | None:
        if self.state == "draining":
            return DRAINING
        if (unread := self._engine.unread_bytes) > MAX_UNREAD_BYTES:
            return saturated(f"{unread} bytes of jobs wait for this node's engine", retry_after=1.0)
        return self._role.refuse(job, self.load)

    # --- the engine -----------------------------------------------------------------------------

    async def follow_engine(self) -> None:
        """Pass on what the engine says, until it ends: raises EngineLost."""
        while True:
            self.said(await self._engine.next())

    def said(self, frame: ToServer) -> None:
        """The engine's frame."""
        match frame:
            case Step():
                self._table.stepped(frame)
            case JobFailed():
                self._table.failed(frame)
            case Load():
                self._figures = frame
                self._unacknowledged.taken(frame.load.jobs_total)
                self._say_load()
                self._table.tidy()
            case CacheEvents():
                self._chunks.update(frame.stored)
                self._chunks.difference_update(frame.evicted)
                self._events += 1
                broadcast(self._links, msgspec.structs.replace(frame, seq=self._events))
            case Saved():
                self._draining.saved()
            case Drained():
                self._drained.set()

    def _say_load(self) -> None:
        self._soon.said()
        broadcast(self._links, self.load)

    # --- the end --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take nothing new, and return when nothing runs here any more: it has ended, routers have
        moved it past the deadline, or it was handed back to them."""
        self._drained.clear()
        self._draining.end()
        while self.requests and not self._draining.leaving:
            await asyncio.sleep(DRAIN_POLL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._waits.move_s):
                while self.requests:
                    await asyncio.sleep(DRAIN_POLL_S)
        self._draining.close()
        self._table.hand_back(HANDED_BACK)
        try:
            async with asyncio.timeout(self._waits.publish_s):
                await self._drained.wait()
        except TimeoutError:
            logger.warning("chunks were still on their way into the store")

    async def close_links(self) -> None:
        """All at once: a router that does not read keeps no other from hearing of it."""
        await asyncio.gather(*(self._close(link) for link in list(self._links)))

    async def _close(self, link: RouterLink) -> None:
        await link.flush()
        await link.close()

    def lose_links(self) -> None:
        """Close what is still open, without waiting: the end has come at once."""
        self._soon.close()
        for link in self._links:
            link.lose()
