"""AsyncLLM's requests for vectors and scores, which wait for the engine process.

In: PooledRequests, and the engine's frames. Out: frames to the engine, and the requests with their
answers. The requests of one call are a group, whose caller waits for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from baton_engine.offline.pooling import PooledRequest
from baton_node.ipc.messages import Step
from baton_protocol.errors import BatonError, Unavailable, error_of
from baton_protocol.ids import RequestId
from baton_protocol.link import Abort, JobFailed, RunJob


class _Group:
    """The requests of one call. `left` counts those that run; `error` is the first of one that
    failed."""

    def __init__(self, left: int, given_id: str | None) -> None:
        self.left, self.given_id = left, given_id
        self.error: BatonError | None = None
        self.changed = asyncio.Event()

    def fail(self, error: BatonError) -> None:
        self.error = self.error or error
        self.changed.set()


@dataclass(frozen=True, slots=True)
class _Running:
    request: PooledRequest
    group: _Group


class PooledRequests:
    """`send` sends a frame to the engine process, and `check` raises if that has ended."""

    def __init__(self, send: Callable[[RunJob | Abort], None], check: Callable[[], None]) -> None:
        self._send, self._check = send, check
        self._running: dict[RequestId, _Running] = {}

    @property
    def unfinished(self) -> int:
        return len(self._running)

    async def run(self, requests: Sequence[PooledRequest], given_id: str | None = None) -> None:
        """Return when all requests have their answers. Raises the error of the first that fails,
        and what `check` raises. If it raises, or is cancelled, the others are aborted."""
        group = _Group(len(requests), given_id)
        for each in requests:
            self._running[each.request.id] = _Running(each, group)
            self._send(RunJob(each.request))
        try:
            while group.left and group.error is None:
                self._check()
                group.changed.clear()
                await group.changed.wait()
            if group.error is not None:
                raise group.error
        finally:
            for each in requests:
                if self._running.pop(each.request.id, None) is not None:
                    self._send(Abort(each.request.id, each.request.attempt))

    def abort(self, given_ids: Collection[str] | None = None) -> None:
        """End the requests of these ids, or all: their callers raise Unavailable."""
        for group in self._groups():
            if given_ids is None or group.given_id in given_ids:
                group.fail(Unavailable("the request was aborted"))

    def wake(self) -> None:
        """The engine process has ended."""
        for group in self._groups():
            group.changed.set()

    def take_step(self, step: Step) -> None:
        for prompted in step.prompts:
            if (running := self._running.get(prompted.request)) is not None:
                stats = prompted.stats
                running.request.cached_tokens = stats.cached_tokens + stats.host_tokens
        for complete in step.complete:
            running = self._running.pop(complete.request, None)
            if running is not None:
                running.request.vector = complete.vector
                running.group.left -= 1
                running.group.changed.set()

    def take_failure(self, failed: JobFailed) -> None:
        if (running := self._running.get(failed.request)) is not None:
            running.group.fail(error_of(failed.error))

    def _groups(self) -> set[_Group]:
        return {running.group for running in self._running.values()}
