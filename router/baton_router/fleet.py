"""The nodes as one thing: their links, what the view believes of them, and the pool's model.

In: hellos, frames and losses of links. Out: view updates; frames about requests go to the
dispatcher, which hears of lost nodes too.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from baton_protocol.errors import NotFound, Unavailable
from baton_protocol.ids import NodeId
from baton_protocol.link import (
    CacheEvents,
    Deltas,
    JobFailed,
    Load,
    PrefillDone,
    ToNode,
    ToRouter,
)
from baton_protocol.store import NodeReport
from baton_router.links import Link
from baton_router.models import FetchError, ModelStore, PoolModel
from baton_router.view import PoolView
from baton_text.artifacts import ArtifactError

# A node whose artifacts could not be had is asked again after this long, while its link is up.
RETRY_MODEL_S = 1.0

logger = logging.getLogger(__name__)


class RequestListener(Protocol):
    def on_deltas(self, node: NodeId, frame: Deltas) -> None: ...

    def on_prefill_done(self, node: NodeId, frame: PrefillDone) -> None: ...

    def on_failed(self, node: NodeId, frame: JobFailed) -> None: ...

    def on_lost(self, node: NodeId) -> None: ...


@dataclass(frozen=True, slots=True)
class Serving:
    """What the pool serves with now: a model, its name and limits, and one of its nodes."""

    model: PoolModel
    name: str
    max_model_len: int
    vocab_size: int
    sample: NodeReport


class Fleet:
    """A LinkListener. `listener` is set once, before the first link is dialled."""

    listener: RequestListener

    def __init__(self, view: PoolView, models: ModelStore, served_name: str | None) -> None:
        self.view = view
        self._models = models
        self._served_name = served_name
        self._links: dict[NodeId, Link] = {}
        self._admissions: set[asyncio.Task[None]] = set()

    # --- links ----------------------------------------------------------------------------------

    def on_hello(self, link: Link, report: NodeReport) -> bool:
        other = self._links.get(report.node)
        known = self.view.nodes.get(report.node)
        if other is not None and other is not link and other.up:
            if known is not None and known.report.epoch == report.epoch:
                logger.debug("%s is %s, linked already", link.address, report.node)
                return False
            self._lose(report.node)  # another engine took the name: the newest hello counts
        self._links[report.node] = link
        self.view.hello(report)
        task = asyncio.create_task(self._admit(link, report))
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)
        return True

    def on_frame(self, link: Link, frame: ToRouter) -> None:
        node = link.report.node if link.report is not None else None
        if node is None or self._links.get(node) is not link:
            return
        if isinstance(frame, Deltas):
            self.listener.on_deltas(node, frame)
        elif isinstance(frame, Load):
            self.view.load(node, frame)
        elif isinstance(frame, PrefillDone):
            self.listener.on_prefill_done(node, frame)
        elif isinstance(frame, CacheEvents):
            self.view.cache(node, frame)
        elif isinstance(frame, JobFailed):
            self.listener.on_failed(node, frame)

    def on_lost(self, link: Link) -> None:
        if link.report is not None and self._links.get(link.report.node) is link:
            self._lose(link.report.node)

    def forget(self, link: Link) -> None:
        """Discovery gave the address up."""
        if link.report is not None and self._links.get(link.report.node) is link:
            del self._links[link.report.node]
            self.view.forget(link.report.node)

    def send(self, node: NodeId, frame: ToNode) -> None:
        link = self._links.get(node)
        if link is not None:
            link.send(frame)

    async def close(self) -> None:
        for task in self._admissions:
            task.cancel()
        await asyncio.gather(*self._admissions, return_exceptions=True)

    # --- the model ------------------------------------------------------------------------------

    def serving(self, wanted: str | None) -> Serving:
        """Raise Unavailable while nobody could serve, NotFound for another model's name."""
        ready = list(self.view.ready())
        model = self._models.ready(ready[0].report) if ready else None
        if model is None:
            raise Unavailable(f"no request can be served now: {self.view.why_not_ready()}")
        report = ready[0].report
        name = self._served_name or report.model
        if wanted and wanted != name:
            raise NotFound(
                f"model {wanted!r} does not exist; this pool serves {name!r}",
                param="model",
                code="model_not_found",
            )
        lengths = (view.report.max_model_len for view in ready)
        return Serving(model, name, min(lengths), report.vocab_size, report)

    def known_name(self) -> str | None:
        """The served model's name, also while its nodes are away."""
        kind = self.view.kind()
        named = (view.report.model for view in self.view.nodes.values() if view.kind == kind)
        return self._served_name or next(named, None)

    async def _admit(self, link: Link, report: NodeReport) -> None:
        """Once its tokenizer is here, a node may get requests."""
        while link.up and link.report is report:
            try:
                await self._models.get(report, link.address)
            except (aiohttp.ClientError, FetchError, OSError, TimeoutError) as error:
                logger.warning("%s waits for its tokenizer: %s", report.node, error)
            except ArtifactError as error:
                logger.error("%s has artifacts that are of no use: %s", report.node, error)
            except Exception:
                logger.exception("the artifacts of %s are of no use", report.node)
            else:
                view = self.view.nodes.get(report.node)
                if view is not None and view.report.epoch == report.epoch:
                    view.usable = True
                    logger.info("%s (%s) is at %s", report.node, report.role, link.address)
                return
            await asyncio.sleep(RETRY_MODEL_S)

    def _lose(self, node: NodeId) -> None:
        self.view.lost(node)
        self.listener.on_lost(node)
