"""Jobs that the server has given to its engine and that no load of the engine counts yet.

An engine hears of jobs between its steps, and a step may take seconds: what one router has booked
meanwhile, the others learn from the server. In: jobs in the order they were given; how many of them
the engine has heard of, with each of its loads. Out: the load with the others added; and the moment
to say it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.store import NodeLoad

SAY_EVERY_S = 0.02


class UnacknowledgedJobs:
    """An engine counts every job that it is given: the n-th load's count says which these are."""

    def __init__(self) -> None:
        self._given = 0
        self._waiting: deque[tuple[int, int]] = deque()  # tokens and sequences of each

    def given(self, job: PrefillJob | RunJob) -> None:
        self._given += 1
        self._waiting.append((_tokens(job), _sequences(job)))

    def taken(self, jobs: int) -> None:
        """The engine has heard of so many since its start."""
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
    """What it is expected to compute here; a partner's work is the partner's."""
    if isinstance(job, RunJob) and job.await_first:
        return 0
    if job.uncached is not None:
        return job.uncached
    return len(job.request.prompt_ids) + sum(map(len, job.request.outputs))


def _sequences(job: PrefillJob | RunJob) -> int:
    finished = len(job.finished) if isinstance(job, RunJob) else 0
    return job.request.params.n - finished


class Soon:
    """Calls `say` soon after changed(): at once, but no oftener than every SAY_EVERY_S. Whoever
    says it for another reason calls said()."""

    def __init__(
        self, say: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._said_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def changed(self) -> None:
        if self._timer is None:
            wait_s = max(0.0, self._said_at + SAY_EVERY_S - self._clock())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._say)

    def said(self) -> None:
        self.close()
        self._said_at = self._clock()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
