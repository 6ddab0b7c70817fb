"""Puts the nodes of an idle pool to sleep, and wakes them when a request needs them.

In: whether this router has calls, and the nodes' loads. Out: calls of the nodes' admin routes.

All routers of a pool do this, and none asks another. That is safe because a node has the last word:
it refuses to sleep if it was in use within `after_s`, and both calls do nothing the second time. A
request that meets a node on its way to sleep is refused there, and waits in its router, which wakes
the node.

Level-triggered: a call that fails is made again as long as its reason holds. Only nodes that sleep
because their pool is idle are woken (`wakes` in their reports), never one that a person put to
sleep. All of them are, so that the pool is as large as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.node_sleep import SLEEP_PATH, SLEEP_SINCE, WAKE_PATH
from baton_router.nodes.fleet import Fleet
from baton_router.nodes.node_calls import NodeCallFailed, NodeCalls, Query

TICK_S = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SleepRule:
    """The pool sleeps at `level` after `after_s` seconds without a request; 0: never. A failed call
    is repeated after `retry_s`."""

    after_s: float
    level: int
    retry_s: float


class PoolSleep:
    """`has_calls`: whether this router has a call that is not answered."""

    def __init__(
        self,
        fleet: Fleet,
        calls: NodeCalls,
        has_calls: Callable[[], bool],
        rule: SleepRule,
        clock: Callable[[], float],
    ) -> None:
        self._view = fleet.view
        self._calls = calls
        self._has_calls = has_calls
        self._rule = rule
        self._clock = clock
        self._used_at = clock()
        self._jobs: dict[Epoch, int] = {}
        self._tasks: dict[tuple[NodeId, str], asyncio.Task[None]] = {}
        self._retry_at: dict[tuple[NodeId, str], float] = {}
        self._troubles: dict[NodeId, str] = {}

    async def watch_pool(self) -> None:
        """Until cancelled: let the nodes sleep or wake up as the pool's use asks for it."""
        try:
            while True:
                self.act()
                await asyncio.sleep(TICK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def act(self) -> None:
        """Call the nodes that should sleep or wake up now. Also called when a call is held."""
        self._drop_lost()
        if not self._rule.after_s or self._is_used_now():
            for name, view in self._view.nodes.items():
                if view.wakes:
                    self._call(name, WAKE_PATH, {})
        elif self._clock() - self._used_at >= self._rule.after_s:
            query = {"level": str(self._rule.level), "idle_s": str(self._rule.after_s)}
            for name, view in self._view.nodes.items():
                if view.ready and view.report.protocol >= SLEEP_SINCE:
                    self._call(name, SLEEP_PATH, query)

    def trouble(self) -> str:
        """Why nodes that should be awake still sleep; "" if nothing is known."""
        return "; ".join(why for name, why in sorted(self._troubles.items()))

    def _is_used_now(self) -> bool:
        """Whether a call is here or a request on a node. Notes use, also what has ended since the
        last look."""
        views = self._view.nodes.values()
        now = self._has_calls() or any(view.report.load.requests for view in views)
        if self._had_jobs() or now:
            self._used_at = self._clock()
        return now

    def _had_jobs(self) -> bool:
        """Whether a node has got jobs since the last look."""
        jobs = {
            view.report.epoch: view.report.load.jobs_total for view in self._view.nodes.values()
        }
        worked = any(jobs.get(epoch, before) != before for epoch, before in self._jobs.items())
        self._jobs = jobs
        return worked

    def _drop_lost(self) -> None:
        """A node that is gone may never answer, and none of its troubles matters any more."""
        nodes = self._view.nodes
        for (name, _), task in self._tasks.items():
            if name not in nodes or not nodes[name].connected:
                task.cancel()
        self._retry_at = {key: at for key, at in self._retry_at.items() if key[0] in nodes}
        self._troubles = {
            name: why
            for name, why in self._troubles.items()
            if name in nodes and nodes[name].report.wakes
        }

    def _call(self, node: NodeId, path: str, query: Query) -> None:
        key = (node, path)
        if key in self._tasks or self._clock() < self._retry_at.get(key, 0.0):
            return
        task = self._tasks[key] = asyncio.create_task(self._post(node, path, query))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _post(self, node: NodeId, path: str, query: Query) -> None:
        try:
            await self._calls.post(node, path, query)
        except NodeCallFailed as error:
            self._retry_at[node, path] = self._clock() + self._rule.retry_s
            wakes = path == WAKE_PATH
            if wakes:
                self._troubles[node] = str(error)
            level = logging.WARNING if wakes else logging.INFO
            logger.log(level, "POST %s: %s", path, error, extra={"node": node})
            return
        self._retry_at.pop((node, path), None)
        if path == WAKE_PATH:
            self._troubles.pop(node, None)
        logger.info("%s has obeyed %s", node, path, extra={"node": node})
