"""All jobs of the step loop, each with its state.

In: jobs that arrive, and the changes of their states. Out: the job of a request, the counts that
load reports show. Fetching and publishing keep what only they know of a job, since that outlives
it: fetches and puts in flight. Only the step loop's thread uses the table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from baton_node.engine.job import Job, JobKey, JobState
from baton_protocol.ids import RequestId

REMEMBERED = 4096  # number of requests whose newest attempt is remembered


class JobTable:
    """The jobs that have not ended: at most one of each request, which is its newest attempt.

    `changes` grows whenever a job arrives, changes its state, has its prompt computed, or ends.
    `freed` counts the jobs that ended while they were running: the engine has freed their blocks.
    """

    def __init__(self) -> None:
        self._jobs: dict[RequestId, Job] = {}
        self._attempts: OrderedDict[RequestId, int] = OrderedDict()
        self.changes = 0
        self.freed = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(tuple(self._jobs.values()))  # jobs may end meanwhile

    def find(self, key: JobKey, state: JobState | None = None) -> Job | None:
        """Return the job of this attempt, or None if it has ended or is not in this state."""
        job = self._jobs.get(key[0])
        if job is None or job.request.attempt != key[1] or state not in (None, job.state):
            return None
        return job

    def find_running(self, request: RequestId) -> Job | None:
        """Return the request's job if it is running."""
        job = self._jobs.get(request)
        return job if job is not None and job.state == "running" else None

    def newest_attempt(self, request: RequestId) -> int:
        """Return the newest attempt of a request that has arrived, even if it has ended; -1 if it
        is not remembered."""
        job = self._jobs.get(request)
        return self._attempts.get(request, -1) if job is None else job.request.attempt

    def add_job(self, job: Job, state: JobState) -> None:
        """Add the job of a request's newest attempt. An older attempt must have ended."""
        request = job.request
        self._jobs[request.id] = job
        self._attempts[request.id] = request.attempt
        self._attempts.move_to_end(request.id)
        while len(self._attempts) > REMEMBERED:
            self._attempts.popitem(last=False)
        self.set_state(job, state)

    def set_state(self, job: Job, state: JobState) -> None:
        """Change the state of a job. One that has "ended" leaves the table."""
        if state == "ended" and self._jobs.get(job.request.id) is job:
            del self._jobs[job.request.id]
            self.freed += job.state == "running"
        job.state = state
        self.changes += 1

    @property
    def waiting_sequences(self) -> int:
        """Number of sequences of the jobs that are not running yet."""
        return sum(job.sequences for job in self._jobs.values() if job.state != "running")

    @property
    def compiling_tokens(self) -> int:
        """Number of tokens that this node will compute for the jobs that wait for their grammar."""
        return sum(job.uncached for job in self._jobs.values() if job.state == "compiling")
