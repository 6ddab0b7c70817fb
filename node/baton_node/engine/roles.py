"""What the step loop asks of the two roles' machinery.

Every node runs both: a prefill node fetches the prefix that the store holds, a decode node writes
behind what it computes. `baton_prefill_node` implements Publishing; `baton_decode_node` implements
Fetching and WritingBehind; `baton_cli.engine_process` gives them to the loop. Only the step loop's
thread calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from baton_engine.interface import Filled, Progress
from baton_node.engine.job import Job, JobKey
from baton_node.store.base import Copied, Fetched, LookedUp, Published
from baton_protocol.store import InboxEntry


class Publishing(Protocol):
    """Prefill jobs' chunks on their way into the store, and to the decode node's inbox."""

    @property
    def empty(self) -> bool:
        """True when no job is open."""
        ...

    def open(self, job: Job) -> None:
        """A prefill job arrived."""

    def looked_up(self, event: LookedUp) -> None:
        """Which chunks have a marker. The job has these markers already."""

    def missing(self, job: Job, chunk: int) -> None:
        """A chunk this job was to reuse is not in the store."""

    def progressed(self, progress: Progress, job: Job) -> None:
        """Right after a step: what it filled is put now, before the blocks can be reused."""

    def published(self, event: Published) -> None:
        """A put has settled; perhaps it is none of a prefill job."""

    def close(self, job: Job) -> None:
        """The job computes no more."""


class WritingBehind(Protocol):
    """What whole requests fill, put into the store for others to find. Nobody waits for it."""

    @property
    def empty(self) -> bool:
        """True when nothing is in flight."""
        ...

    @property
    def saved(self) -> bool:
        """True when nothing that was in flight at the last watch() still is."""
        ...

    def watch(self) -> None: ...

    def drain(self, draining: bool) -> None:
        """Whether to leave nothing out from now on."""

    def filled(self, filled: Filled, job: Job) -> None:
        """Right after a step: a chunk of a whole request."""

    def copied(self, event: Copied) -> None: ...

    def published(self, event: Published) -> None: ...

    def close(self, job: Job) -> None:
        """The job computes no more."""


class Fetching(Protocol):
    """Parked requests: they close their gap from the store, and are then admitted to the running
    batch. len() is how many are parked; aborted ones that wait for their fetches do not count."""

    def __len__(self) -> int: ...

    @property
    def empty(self) -> bool:
        """True when nothing is parked and no fetch is in flight."""
        ...

    @property
    def sequences(self) -> int:
        """What they are going to run here: each choice of a request, or the one prompt of a prefill
        job."""
        ...

    @property
    def tokens(self) -> int:
        """What they are going to compute here."""
        ...

    @property
    def early_entries(self) -> int:
        """Inbox entries that wait for their job."""
        ...

    def get(self, key: JobKey) -> Job | None:
        """A parked job that was not aborted."""

    def is_settling(self, key: JobKey) -> bool:
        """Whether it was aborted and its fetches still end."""
        ...

    def jobs(self) -> Iterable[Job]:
        """All that get() finds."""
        ...

    def park(self, job: Job, *, cached_blocks: int, await_first: bool) -> None:
        """A job arrived, whose first `cached_blocks` blocks are in the own cache. `await_first`: a
        prefill partner computes its prompt."""

    def looked_up(self, job: Job) -> None:
        """The lookup was answered, and the job has the markers that were found."""

    def announced(self, entry: InboxEntry, *, is_early: bool) -> None:
        """What a prefill partner says of a request's chunks. `is_early`: its job may still come."""

    def fetched(self, event: Fetched) -> Job | None:
        """A fetch has settled. Return its job, which is here until the last one has; None for a
        sample, which belongs to nobody."""

    def know_first(self, job: Job) -> None:
        """The router sent the partner's first tokens, or that there are none."""

    def abort(self, job: Job) -> None: ...

    def grant(self) -> None:
        """Give blocks to those that can fetch, oldest first; stop at the first that finds none."""

    def give_back(self) -> None:
        """The youngest that holds blocks gives them back."""

    def expire(self, now: float) -> None:
        """Go on with those that have waited long enough."""

    def next_deadline(self) -> float | None: ...
