"""Jobs that the server has sent to its engine, and that the engine's load does not count yet.

The engine reads jobs between its steps, and a step can take seconds. Meanwhile the server adds
these jobs to the load, so that routers see each other's jobs.

In: jobs, in the order in which they are sent; with each load, how many the engine has received.
Out: the load with the missing jobs added, and when to send it.
"""

from __future__ import annotations

from collections import deque

import msgspec

from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.store import NodeLoad


class UncountedJobs:
    """The jobs that are not in the engine's load yet. The engine counts each job that it receives
    in order, so the count in its load says which ones are missing."""

    def __init__(self) -> None:
        self._given = 0
        self._waiting: deque[tuple[int, int]] = deque()  # (tokens, sequences) of each job

    def add_job(self, job: PrefillJob | RunJob) -> None:
        self._given += 1
        self._waiting.append((_tokens(job), _sequences(job)))

    def drop_counted(self, jobs: int) -> None:
        """The engine has received `jobs` jobs since its start."""
        while self._waiting and self._given - len(self._waiting) < jobs:
            self._waiting.popleft()

    def add_to_load(self, load: NodeLoad) -> NodeLoad:
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
