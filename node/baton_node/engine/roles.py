"""The Protocols through which the step loop uses the packages of the two roles.

Every node runs both packages: a prefill node also fetches prefixes from the store, and a decode
node also writes behind what it computes. `baton_prefill_node` implements Publishing.
`baton_decode_node` implements Fetching and WritingBehind. `baton_cli.engine_process` passes them to
the loop. Only the step loop's thread calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from baton_engine.interface import Filled, Progress
from baton_node.engine.job import Job, JobKey
from baton_node.store.base import Copied, Fetched, LookedUp, Published
from baton_protocol.store import InboxEntry


class Publishing(Protocol):
    """Puts the chunks of prefill jobs into the store and announces them in the decode node's
    inbox."""

    @property
    def empty(self) -> bool:
        """True when no job is open."""
        ...

    def open(self, job: Job) -> None:
        """A prefill job has arrived."""

    def looked_up(self, event: LookedUp) -> None:
        """A lookup was answered. The job already has the markers that were found."""

    def missing(self, job: Job, chunk: int) -> None:
        """The fetch of a chunk with a marker has failed: treat the chunk as not stored. The job
        need not be a prefill job."""

    def progressed(self, progress: Progress, job: Job) -> None:
        """A step has computed tokens of a prefill job. Called right after the step: hold the blocks
        of chunks to put now, before the engine can reuse them."""

    def published(self, event: Published) -> None:
        """A put has settled. It need not belong to a prefill job."""

    def close(self, job: Job) -> None:
        """The job computes no more. It need not be a prefill job."""


class WritingBehind(Protocol):
    """Puts the chunks that whole requests fill into the store for later requests. No request waits
    for these puts."""

    @property
    def empty(self) -> bool:
        """True when no put is in flight."""
        ...

    @property
    def saved(self) -> bool:
        """True when every put in flight at the last watch() has settled."""
        ...

    def watch(self) -> None: ...

    def drain(self, draining: bool) -> None:
        """Start (True) or stop (False) to put every chunk, without limits of bandwidth."""

    def filled(self, filled: Filled, job: Job) -> None:
        """A whole request has a full chunk. Hold its blocks now, before the engine can reuse
        them."""

    # These two get the events of all puts, also those of other parts.
    def copied(self, event: Copied) -> None: ...

    def published(self, event: Published) -> None: ...

    def close(self, job: Job) -> None:
        """The job computes no more. It need not be a whole request."""


class Fetching(Protocol):
    """Parked requests: they fetch KV from the store and then join the running batch. len() is the
    number of parked requests, without aborted ones whose fetches are still in flight."""

    def __len__(self) -> int: ...

    @property
    def empty(self) -> bool:
        """True when no request is parked and no fetch for a request is in flight."""
        ...

    @property
    def sequences(self) -> int:
        """Number of sequences that the parked requests will run on this node: each open choice of a
        whole request, or 1 for a prefill job."""
        ...

    @property
    def tokens(self) -> int:
        """Number of tokens that the parked requests will compute on this node."""
        ...

    @property
    def early_entries(self) -> int:
        """Number of inbox entries that wait for their job."""
        ...

    def get(self, key: JobKey) -> Job | None:
        """Return a parked job, or None if there is none or it was aborted."""

    def is_settling(self, key: JobKey) -> bool:
        """Return whether the job was aborted and still has fetches in flight."""
        ...

    def jobs(self) -> Iterable[Job]:
        """Return all parked jobs, without the aborted ones."""
        ...

    def park(self, job: Job, *, cached_blocks: int, await_first: bool) -> None:
        """A job has arrived. Its first `cached_blocks` blocks are in this node's cache. With
        `await_first` a prefill node computes its prompt."""

    def looked_up(self, job: Job) -> None:
        """A parked job's lookup was answered. The job has the markers that were found."""

    def announced(self, entry: InboxEntry, *, is_early: bool) -> None:
        """A prefill node announced chunks of a request, or their end. `is_early` means that the
        request's job may still arrive: keep the entry for it."""

    def fetched(self, event: Fetched) -> Job | None:
        """A fetch has settled. Return its job, or None for a sample, which belongs to no job. A job
        stays here until its last fetch has settled."""

    def know_first(self, job: Job) -> None:
        """The router sent FirstTokens or NoFirstTokens for a parked job."""

    # The job's blocks are released when its fetches have settled.
    def abort(self, job: Job) -> None: ...

    def grant(self) -> None:
        """Reserve blocks for the requests that have chunks to fetch, oldest first. Stop at the
        first for which too few blocks are free."""

    def give_back(self) -> None:
        """Make the youngest request that holds blocks release them."""

    def expire(self, now: float) -> None:
        """Stop waiting for those requests whose timeout has passed; `now` is in seconds of the
        loop's clock."""

    # When expire() is due next, in seconds of the loop's clock; None if no request has a timeout.
    def next_deadline(self) -> float | None: ...
