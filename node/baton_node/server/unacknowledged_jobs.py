"""Jobs that the server has sent to its engine, and that the engine's load does not count yet.

The engine reads jobs between its steps, and a step can take seconds. Meanwhile the server adds
these jobs to the load, so that routers see each other's jobs.

In: jobs, in the order in which they are sent; with each load, how many the engine has received.
Out: the load with the missing jobs added, and when to send it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.store import NodeLoad

SEND_EVERY_S = 0.02


class UnacknowledgedJobs:
    """The jobs that are not in the engine's load yet. The engine counts each job that it receives
    in order, so the count in its load says which ones are missing."""

    def __init__(self) -> None:
        self._given = 0
        self._waiting: deque[tuple[int, int]] = deque()  # (tokens, sequences) of each job

    def given(self, job: PrefillJob | RunJob) -> None:
        self._given += 1
        self._waiting.append((_tokens(job), _sequences(job)))

    def taken(self, jobs: int) -> None:
        """The engine has received `jobs` jobs since its start."""
        while self._waiting and self._given - len(self._waiting) < jobs:
            self._waiting.popleft()

    def added_to(self, load: NodeLoad) -> NodeLoad:
        if not self._waiting:
            return load
        return msgspec.structs.replace(
            load,
            queued_tokens=load.queued_tokens + sum(tokens for tokens, _ in self._waiting),
            waiting=load.waiting + sum(sequences for _, sequences in self._waiting),
        )


def _tokens(job: PrefillJob | RunJob) -> int:
    """Return how many tokens the job is expected to compute on this node: none while a prefill node
    computes its prompt."""
    if isinstance(job, RunJob) and job.await_first:
        return 0
    if job.uncached is not None:
        return job.uncached
    return len(job.request.prompt_ids) + sum(map(len, job.request.outputs))


def _sequences(job: PrefillJob | RunJob) -> int:
    finished = len(job.finished) if isinstance(job, RunJob) else 0
    return job.request.params.n - finished


class LoadThrottle:
    """Calls `send` after changed(), at once but at most every SEND_EVERY_S seconds. Call sent() for
    each report, including those from `send`."""

    def __init__(
        self, send: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send = send
        self._clock = clock
        self._sent_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        if self._timer is None:
            wait_s = max(0.0, self._sent_at + SEND_EVERY_S - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._send)

    def sent(self) -> None:
        self.close()
        self._sent_at = self._clock()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
