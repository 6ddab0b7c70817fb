"""All nodes of the pool: their links, and their state in the view.

In: hellos, frames and breaks of links. Out: view updates; frames about requests, and lost and
resumed nodes, go to the dispatcher.

    link broken                   the node has `link_patience_s` to come back with the same engine
                                  and then continues; if its address refuses or has another
                                  engine: lost
    pings unanswered              lost at once
    no engine step for long       lost although its link is up; gets no requests before it steps
    draining, past the deadline   not lost: its requests move when another node can take them
    two engines under one name    the epoch that appeared last is used; the other is reported

Aborts for an unreachable node are kept. They are sent first when the same engine is back, because
they free its blocks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol

import aiohttp

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import (
    Abort,
    CacheEvents,
    Deltas,
    JobFailed,
    Load,
    PrefillDone,
    Resync,
    ToNode,
    ToRouter,
)
from baton_protocol.store import NodeReport, differing
from baton_router.nodes.kv_events import KVEventListener
from baton_router.nodes.link import LATE_S, Flaw, Loss, NodeLink
from baton_router.nodes.model_offers import ModelOffers
from baton_router.nodes.model_store import FetchError, ModelStore, TooLargeError
from baton_router.nodes.pool_view import PoolView
from baton_router.settings import RouterSettings
from baton_text.artifacts import ArtifactError

RETRY_LARGE_S = 60.0  # before fetching files again that were too large; they rarely shrink
WATCH_S = 0.5
IDLE_REPORT_S = 1.5  # idle engines report more often; a stall starts after this
KEPT_ABORTS = 4096
KEPT_EPOCHS = 64

logger = logging.getLogger(__name__)


class RequestListener(Protocol):
    def on_deltas(self, node: NodeId, frame: Deltas) -> None: ...

    def on_prefill_done(self, node: NodeId, frame: PrefillDone) -> None: ...

    def on_failed(self, node: NodeId, frame: JobFailed) -> None: ...

    def on_lost(self, node: NodeId, cause: Loss, alive_at: float) -> None:
        """The node was lost before it got anything that was placed on it after `alive_at`."""
        ...

    def on_resumed(self, node: NodeId) -> None:
        """The link is back and the engine is the same."""
        ...

    def on_leaving(self, node: NodeId) -> None:
        """Move the requests that run there. Called again with each of the node's loads."""
        ...

    def on_change(self) -> None:
        """The pool changed: a waiting request may find a place now."""
        ...


class Fleet:
    """A LinkListener for all nodes. Set `listener` once, before the first link is dialled."""

    listener: RequestListener

    def __init__(
        self,
        view: PoolView,
        models: ModelStore,
        settings: RouterSettings,
        rng: random.Random,
        clock: Callable[[], float],
    ) -> None:
        self.view = view
        self._models = models
        self.offers = ModelOffers(view, models, settings.served_model_name, rng)
        self._patience_s = settings.link_patience_s
        self._stall_timeout_s = settings.stall_timeout_s
        self._retry_model_s = settings.tunables.retry_model_s
        self._clock = clock
        self._links: dict[NodeId, NodeLink] = {}
        self._broken: dict[NodeId, asyncio.TimerHandle] = {}
        self._kept: deque[tuple[NodeId, Epoch, Abort]] = deque(maxlen=KEPT_ABORTS)
        self._older: dict[NodeId, deque[Epoch]] = {}  # epochs replaced by a newer engine
        self._admissions: set[asyncio.Task[None]] = set()
        self._complaints: dict[str, str] = {}  # the last logged complaint by address
        self.refused: Counter[str] = Counter()  # refused frames and artifacts by reason
        self.kv_events = KVEventListener(view, clock)

    # --- links ----------------------------------------------------------------------------------

    def on_hello(self, link: NodeLink, report: NodeReport) -> bool:
        node, rival = report.node, link.rival
        link.rival = ""
        self._forget_old_node(link, node)
        holder, previous = self._links.get(node), self.view.nodes.get(node)
        same_engine = previous is not None and previous.report.epoch == report.epoch
        if holder is not None and holder is not link:
            if holder.up and same_engine:
                logger.debug("%s is %s, which already has a link", link.address, node)
                return False
            if report.epoch in self._older.get(node, ()) and (holder.up or node in self._broken):
                link.rival = holder.address
                if link.rival != rival:
                    self._conflict(node, link, holder)
                return False
        if previous is not None and not same_engine:
            # The newest hello wins. If both engines live, the older one says hello again.
            older = self._older.setdefault(node, deque(maxlen=KEPT_EPOCHS))
            older.append(previous.report.epoch)
            self._lose(node, "restarted")
        self._links[node] = link
        if holder is not None and holder is not link:
            holder.drop_connection()
        self.view.hello(report)
        task = asyncio.create_task(self._admit(link, report))
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)
        return True

    def on_up(self, link: NodeLink) -> None:
        assert link.report is not None
        node, epoch = link.report.node, link.report.epoch
        for node_of_abort, epoch_of_abort, abort in self._kept:
            if (node_of_abort, epoch_of_abort) == (node, epoch):
                link.send_frame(abort)
        kept = [item for item in self._kept if item[0] != node]
        self._kept = deque(kept, maxlen=KEPT_ABORTS)
        timer = self._broken.pop(node, None)
        if timer is not None:
            timer.cancel()
            self.listener.on_resumed(node)
        self.listener.on_change()

    def on_frame(self, link: NodeLink, frame: ToRouter) -> None:
        node = self._node_of(link)
        if node is None:
            return
        if isinstance(frame, Deltas):
            self._note_progress(node)
            self.listener.on_deltas(node, frame)
        elif isinstance(frame, Load):
            self._load(node, frame)
        elif isinstance(frame, PrefillDone):
            self._note_progress(node)
            self.listener.on_prefill_done(node, frame)
        elif isinstance(frame, CacheEvents):
            self.kv_events.apply_events(node, frame)
        elif isinstance(frame, JobFailed):
            self.listener.on_failed(node, frame)

    def on_broken(self, link: NodeLink, *, silent: bool) -> None:
        node = self._node_of(link)
        if node is None:
            return
        self.view.lost(node)
        self.kv_events.forget_node(node)
        if silent:
            logger.warning("%s does not answer pings", node, extra={"node": node})
            self._lose(node, "pings", link.due_at)
        else:
            loop = asyncio.get_running_loop()
            self._broken[node] = loop.call_later(self._patience_s, self._lose, node, "link")

    def on_refused(self, link: NodeLink) -> None:
        node = self._node_of(link)
        if node is not None and node in self._broken:
            self._lose(node, "link")

    def on_bad_frame(self, link: NodeLink, flaw: Flaw, why: str) -> None:
        """Keep the node's last known state. Since the bad frame may have reported progress, count
        it as progress."""
        self.refused[flaw] += 1
        node = self._node_of(link)
        if node is not None:
            self.view.moved(node)
        if self._complaints.get(link.address) != why:
            self._complaints[link.address] = why
            logger.warning(
                "%s sends frames that the router cannot use (logged once): %s",
                *(node or link.address, why),
                extra={"node": node},
            )

    def forget_link(self, link: NodeLink) -> None:
        """Discovery removed the address."""
        self._complaints.pop(link.address, None)
        node = self._node_of(link)
        if node is not None:
            self._forget(node, "link")

    def address_of(self, node: NodeId) -> str | None:
        """The address of the node's link."""
        link = self._links.get(node)
        return link.address if link is not None else None

    def send_frame(self, node: NodeId, frame: ToNode) -> None:
        link, view = self._links.get(node), self.view.nodes.get(node)
        if link is None or view is None:
            return
        link.send_frame(frame)
        if isinstance(frame, Abort) and not link.up:
            self._kept.append((node, view.report.epoch, frame))

    async def watch_engines(self) -> None:
        """Until cancelled: find stalled engines, and request listings after missed cache events. If
        the tick itself was late, this process was blocked, and no node is blamed for that time."""
        while True:
            due = self._clock() + WATCH_S
            await asyncio.sleep(WATCH_S)
            late = self._clock() - due
            if late > LATE_S:
                self.view.skip_time(late)
            for node in self.kv_events.next_listings():
                self.send_frame(node, Resync())
            for node in self.view.find_stalled(self._stall_timeout_s):
                logger.warning("the engine of %s is stalled", node, extra={"node": node})
                try:
                    self._lose(node, "stalled", self.view.nodes[node].moved_at + IDLE_REPORT_S)
                except Exception:  # our bug; keep watching
                    logger.exception("cannot mark %s as lost", node, extra={"node": node})

    async def cancel_work(self) -> None:
        for timer in self._broken.values():
            timer.cancel()
        for task in self._admissions:
            task.cancel()
        await asyncio.gather(*self._admissions, return_exceptions=True)

    # --- the model ------------------------------------------------------------------------------

    async def _admit(self, link: NodeLink, report: NodeReport) -> None:
        """Fetch the node's model, then make the node usable; retry while its link is up."""
        while link.up and link.report is report:
            try:
                await self._models.fetch_model(report, link.address)
            except TooLargeError as error:
                self.refused["artifact"] += 1
                logger.error("not using %s: %s", report.node, error)
                await asyncio.sleep(RETRY_LARGE_S)
            except (aiohttp.ClientError, FetchError, OSError, TimeoutError) as error:
                logger.warning("cannot fetch the tokenizer of %s yet: %s", report.node, error)
            except ArtifactError as error:
                logger.error("cannot use the tokenizer files of %s: %s", report.node, error)
            except Exception:
                logger.exception("loading the tokenizer files of %s failed", report.node)
            else:
                self._models.forget_unused(view.report for view in self.view.nodes.values())
                view = self.view.nodes.get(report.node)
                if view is not None and view.report.epoch == report.epoch:
                    view.usable = True
                    logger.info(
                        "%s (%s) is ready at %s",
                        report.node,
                        report.role,
                        link.address,
                        extra={"node": report.node},
                    )
                    self._compare(report)
                    self._changed()
                return
            await asyncio.sleep(self._retry_model_s)

    def _compare(self, report: NodeReport) -> None:
        """Log why the node does not pair with the serving ones; in a roll-out this is normal."""
        sample = self.view.sample()
        parts = differing(report, sample.report) if sample is not None else []
        if sample is None or not parts:
            return
        rolls = report.revision != sample.report.revision
        logger.log(
            logging.INFO if rolls else logging.WARNING,
            "%s and %s are of different kinds: they differ in %s%s; no request can use both",
            *(report.node, sample.report.node, ", ".join(parts)),
            f" ({report.weights}, {sample.report.weights})" if "weights" in parts else "",
            extra={"node": report.node},
        )

    # --- node events ------------------------------------------------------------------------------

    def _node_of(self, link: NodeLink) -> NodeId | None:
        """The node that this link currently represents, or None."""
        node = link.report.node if link.report is not None else None
        return node if node is not None and self._links.get(node) is link else None

    def _forget_old_node(self, link: NodeLink, name: NodeId) -> None:
        """Forget a node whose address another node has taken over."""
        for node, held in list(self._links.items()):
            if held is link and node != name:
                self._forget(node, "restarted")

    def _conflict(self, node: NodeId, link: NodeLink, holder: NodeLink) -> None:
        """Report two live engines with one name. Both keep saying hello; the replaced one gets the
        name back only when the other is gone."""
        logger.error(
            "two nodes are named %s: the router uses the newer one at %s and ignores the one "
            "at %s; give each node a unique name (--node), or none",
            *(node, holder.address, link.address),
            extra={"node": node},
        )

    def _forget(self, node: NodeId, cause: Loss) -> None:
        self._lose(node, cause)
        del self._links[node]
        self._older.pop(node, None)
        self.view.forget(node)
        self.listener.on_change()  # waiting requests may have to switch or give up

    def _changed(self) -> None:
        self.offers.remember_offer()
        self.listener.on_change()

    def _load(self, node: NodeId, frame: Load) -> None:
        view = self.view.nodes[node]
        previous = (view.ready, view.report.store, view.report.replaced_by)
        self.view.load(node, frame)
        if (view.ready, view.report.store, view.report.replaced_by) != previous:
            self._changed()
        if frame.leaving and view.report.epoch == frame.epoch:
            self.listener.on_leaving(node)

    def _note_progress(self, node: NodeId) -> None:
        stalled = self.view.nodes[node].stalled
        self.view.moved(node)
        if stalled:
            self.listener.on_change()

    def _lose(self, node: NodeId, cause: Loss, alive_at: float | None = None) -> None:
        timer = self._broken.pop(node, None)
        if timer is not None:
            timer.cancel()
        self.listener.on_lost(node, cause, self._clock() if alive_at is None else alive_at)
