"""One node in service: engine process, table of requests and links, put together.

In: frames of routers and of the engine. Out: frames to both. Holds what a link's first frames need:
the report, the last load, the chunks in the engine's cache.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from baton_node.engine_process import EngineProcess
from baton_node.frames import Drain, Drained, Step, ToServer
from baton_node.identity import Identity
from baton_node.links import Link, broadcast
from baton_node.metrics import NodeMetrics
from baton_node.role import NodeRole, saturated
from baton_node.table import Table
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import BlockHash, Epoch
from baton_protocol.link import (
    Abort,
    CacheEvents,
    First,
    Hello,
    JobFailed,
    Load,
    NoFirst,
    PrefillJob,
    RunJob,
    ToNode,
)
from baton_protocol.store import NodeReport, NodeState
from baton_text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
DRAIN_PUBLISHING_S = 2.0
# Jobs for an engine in a long step wait in this process: a link is read whatever the engine does,
# or its router would miss the answers to its pings.
MAX_UNREAD_BYTES = 64 << 20

DRAINING = ErrorRecord(
    message="this node is draining and takes nothing new",
    code="draining",
    status=503,
    retryable=True,
)


class Service:
    """Lives in the server's event loop."""

    def __init__(
        self,
        identity: Identity,
        engine: EngineProcess,
        tokenizer: Tokenizer,
        role: NodeRole,
        metrics: NodeMetrics,
    ) -> None:
        self._identity = identity
        self._engine = engine
        self._role = role
        self._table = Table(tokenizer, engine.send, metrics, identity.settings.link_grace_s)
        self._links: set[Link] = set()
        self._chunks: set[BlockHash] = set(identity.ready.chunks)
        self._drained = asyncio.Event()
        self.state: NodeState = "ready"
        ready = identity.ready
        self.load = Load(identity.epoch, self.state, ready.speeds, ready.load, ready.store)

    @property
    def requests(self) -> int:
        """Requests whose last token was not sent yet."""
        return len(self._table)

    @property
    def epoch(self) -> Epoch:
        return self._identity.epoch

    def report(self) -> NodeReport:
        return self._identity.report(self.state, self.load)

    # --- routers --------------------------------------------------------------------------------

    def joined(self, link: Link) -> None:
        """A link opens with who we are and what we hold."""
        link.send(Hello(self.report()))
        link.send(CacheEvents(self.epoch, stored=tuple(self._chunks), reset=True))
        link.send(self.load)
        self._links.add(link)

    def left(self, link: Link) -> None:
        """A link is gone; its requests have `link_grace_s` to be claimed."""
        self._links.discard(link)
        if self._table.orphan(link):
            grace = self._identity.settings.link_grace_s
            asyncio.get_running_loop().call_later(grace, self._table.tidy)

    def heard(self, link: Link, frame: ToNode) -> None:
        """A router's frame."""
        match frame:
            case PrefillJob() | RunJob():
                self._job(link, frame)
            case First():
                self._table.first(frame)
            case NoFirst():
                self._table.no_first(frame)
            case Abort():
                self._table.abort(frame)

    def _job(self, link: Link, job: PrefillJob | RunJob) -> None:
        if self._table.goes_on(job, link):
            return
        request, attempt = job.request.id, job.request.attempt
        refusal = self._refusal(job)
        if refusal is not None:
            about = {"request": request, "attempt": attempt}
            logger.info("refused: %s", refusal.code, extra=about)
            link.send(JobFailed(request, attempt, refusal))
            return
        self._table.open(job, link)

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
            self._said(await self._engine.next())

    def _said(self, frame: ToServer) -> None:
        match frame:
            case Step():
                self._table.stepped(frame)
            case JobFailed():
                self._table.failed(frame)
            case Load():
                self.load = msgspec.structs.replace(frame, state=self.state)
                broadcast(self._links, self.load)
                self._table.tidy()
            case CacheEvents():
                self._chunks.update(frame.stored)
                self._chunks.difference_update(frame.evicted)
                broadcast(self._links, frame)
            case Drained():
                self._drained.set()

    # --- the end --------------------------------------------------------------------------------

    async def drain(self, deadline_s: float) -> bool:
        """Take nothing new, let running requests end and their chunks be stored. False if the
        deadline came first."""
        self.state = "draining"
        self.load = msgspec.structs.replace(self.load, state="draining")
        broadcast(self._links, self.load)
        try:
            async with asyncio.timeout(deadline_s):
                while self.requests:
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            return False
        self._engine.send(Drain())
        try:
            async with asyncio.timeout(DRAIN_PUBLISHING_S):
                await self._drained.wait()
        except TimeoutError:
            logger.warning("chunks were still on their way into the store")
        return True

    async def close_links(self) -> None:
        """All at once: a router that does not read keeps no other from hearing of it."""
        await asyncio.gather(*(self._close(link) for link in list(self._links)))

    async def _close(self, link: Link) -> None:
        await link.flush()
        await link.close()

    def lose_links(self) -> None:
        """Close what is still open, without waiting: the end has come at once."""
        for link in self._links:
            link.lose()
