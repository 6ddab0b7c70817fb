"""Prefixes that routers want this node to keep in its cache until a time.

In: PinPrefix and UnpinPrefix frames, a clock. Out: a prefill job of the lowest priority for each
prefix, which fetches what the store has, computes the rest and puts what the store lacks; then a
pin in the engine (see `baton_engine.kv.pins`), until its time is over. Each Load says how far they
are. A pin that the engine refused or released is forgotten after a while, so that routers, which
miss it in the Load, ask again. Only the step loop's thread calls this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton_engine.errors import PinRefused
from baton_node.engine.job import Job
from baton_node.engine.loop_context import LoopContext
from baton_node.engine.request_check import check_request
from baton_node.engine.roles import Publishing
from baton_protocol.errors import InvalidRequest
from baton_protocol.figures import MOST
from baton_protocol.ids import BlockHash, RequestId
from baton_protocol.link import PinPrefix, PinReport, PinState
from baton_protocol.request import Request
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import MAX_PINS

logger = logging.getLogger(__name__)
RETRY_S = 30.0  # until a refused or released pin is forgotten
LOWEST_PRIORITY = MOST
RELEASED = "a request needed the blocks"


@dataclass(slots=True, eq=False)
class WantedPrefix:
    """A prefix and how far it is. `job` is set until the prefix is pinned and stored."""

    frame: PinPrefix
    deadline: float  # by the loop's clock, as all times
    hashes: tuple[BlockHash, ...] = ()
    state: PinState = "loading"
    reason: str = ""
    job: Job | None = None
    kept: bool = False  # the engine has pinned it
    forgotten_at: float | None = None


class PrefixPins:
    """The prefixes that this node is to keep. `start` begins a prefill job without a decode node,
    whose chunks stay in the store until a Unix time; `abort` ends one."""

    def __init__(
        self,
        context: LoopContext,
        publishing: Publishing,
        start: Callable[[Request, int], Job],
        abort: Callable[[Job], None],
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._clock = context.clock
        self._publishing = publishing
        self._start = start
        self._abort = abort
        self._wanted: dict[str, WantedPrefix] = {}
        self._jobs_begun = 0

    def reports(self) -> tuple[PinReport, ...]:
        return tuple(
            PinReport(id, wanted.frame.until, wanted.state, wanted.reason)
            for id, wanted in self._wanted.items()
        )

    def pin(self, frame: PinPrefix) -> None:
        """A router wants a prefix kept, or another end for one that is. A renewed one stays pinned
        meanwhile."""
        earlier = self._wanted.get(frame.id)
        if earlier is not None and earlier.frame.until == frame.until:
            return
        if earlier is None and len(self._wanted) == MAX_PINS:
            logger.warning("prefix %s is not pinned: %d others are wanted", frame.id, MAX_PINS)
            return
        if earlier is not None:
            self._stop(earlier)
        wanted = WantedPrefix(frame, self._clock() + frame.ttl_s)
        self._wanted[frame.id] = wanted
        self._context.jobs.changes += 1
        request = self._request(frame)
        try:
            check_request(request, self._engine.info)
            wanted.hashes = self._engine.block_hashes(request)
            self._engine.pins.check(frame.id, wanted.hashes)
        except (InvalidRequest, PinRefused) as error:
            self._give_up(wanted, "refused", str(error))
        else:
            wanted.job = self._start(request, frame.until)

    def _request(self, frame: PinPrefix) -> Request:
        """A request that computes the prefix's full blocks, and one token."""
        self._jobs_begun += 1
        size = self._engine.info.layout.block_size
        ids = frame.prompt_ids[: len(frame.prompt_ids) // size * size]
        return Request(
            id=RequestId(f"pin-{frame.id}"),
            attempt=self._jobs_begun,
            prompt_ids=ids,
            params=SamplingParams(max_tokens=1, temperature=0.0),
            outputs=((),),
            time_left=frame.ttl_s,
            salt=frame.salt,
            priority=LOWEST_PRIORITY,
        )

    def unpin(self, id: str) -> None:
        wanted = self._wanted.pop(id, None)
        if wanted is not None:
            self._stop(wanted)
            self._engine.pins.unpin(id)
            self._context.jobs.changes += 1

    def stop_loading(self) -> None:
        """The node drains: forget the prefixes that are not there yet."""
        for id, wanted in list(self._wanted.items()):
            if wanted.job is not None:
                self.unpin(id)

    def forget_all(self) -> None:
        """The cache is emptied: routers ask again for what they miss."""
        for id in list(self._wanted):
            self.unpin(id)

    def settle(self) -> None:
        """Pin the prefixes whose jobs have ended. Call it before the engine's next step, in which
        their blocks may be reused."""
        for wanted in self._wanted.values():
            job = wanted.job
            if job is None or job.state != "ended":
                continue
            try:
                if not wanted.kept:
                    self._engine.pins.pin(wanted.frame.id, wanted.hashes)
                    wanted.kept = True
            except PinRefused as error:
                self._give_up(wanted, "refused", str(error))
                continue
            if not self._publishing.has_job(job.key):
                wanted.job, wanted.state = None, "pinned"
                self._context.jobs.changes += 1

    def expire(self) -> None:
        """Unpin what is over, and note what the engine has released."""
        now, pinned = self._clock(), self._engine.pins.names
        for id, wanted in list(self._wanted.items()):
            if wanted.deadline <= now:
                self.unpin(id)
            elif wanted.forgotten_at is not None:
                if wanted.forgotten_at <= now:
                    del self._wanted[id]
            elif wanted.state == "pinned" and id not in pinned:
                self._give_up(wanted, "released", RELEASED)

    def _give_up(self, wanted: WantedPrefix, state: PinState, reason: str) -> None:
        logger.info("prefix %s is %s: %s", wanted.frame.id, state, reason)
        self._engine.pins.unpin(wanted.frame.id)
        wanted.job, wanted.state, wanted.reason = None, state, reason
        wanted.forgotten_at = self._clock() + RETRY_S
        self._context.jobs.changes += 1

    def _stop(self, wanted: WantedPrefix) -> None:
        if wanted.job is not None and wanted.job.state != "ended":
            self._abort(wanted.job)
        wanted.job = None
