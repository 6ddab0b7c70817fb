"""The Protocols through which the step loop calls the packages of the two roles.

They break an import cycle: the roles' classes work on jobs and blocks of this package, and the
step loop, which is in this package, calls them. Every engine process has one of each: a prefill
node also fetches prefixes from the store, and a decode node also writes behind what it computes.

    Publishing      baton_prefill_node.publisher.Publisher
    Fetching        baton_decode_node.fetcher.Fetcher
    WritingBehind   baton_decode_node.write_behind.WriteBehind

`baton_cli.engine_process` makes them. Only the step loop's thread calls them.
"""

from __future__ import annotations

from typing import Protocol

from baton_engine.interface import Filled, Progress
from baton_node.engine.job import Job, JobKey
from baton_node.store.base import ChunkFetched
from baton_protocol.store import InboxEntry


class Publishing(Protocol):
    """Puts the chunks of prefill jobs into the store and announces them in the decode node's
    inbox."""

    @property
    def empty(self) -> bool:
        """True when no job is open."""
        ...

    def has_job(self, key: JobKey) -> bool:
        """Return whether this job is open: it computes, or one of its puts has not settled."""
        ...

    def open_job(self, job: Job) -> None:
        """A prefill job has arrived."""

    def use_lookup(self, job: Job) -> None:
        """The lookup for a job was answered: the job has the markers. It need not be a prefill
        job."""

    def put_again(self, job: Job, chunk: int) -> None:
        """The fetch of a chunk with a marker has failed: treat the chunk as not stored. The job
        need not be a prefill job."""

    def publish_progress(self, progress: Progress, job: Job) -> None:
        """A step has computed tokens of a prefill job. Called right after the step: hold the blocks
        of chunks to put now, before the engine can reuse them."""

    def close_job(self, job: Job) -> None:
        """The job computes no more. It need not be a prefill job."""


class WritingBehind(Protocol):
    """Puts the chunks that whole requests fill into the store for later requests. No request waits
    for these puts."""

    @property
    def saved(self) -> bool:
        """True when every put in flight at the last watch_puts() has settled."""
        ...

    def watch_puts(self) -> None: ...

    def set_draining(self, draining: bool) -> None:
        """Start (True) or stop (False) to put every chunk, without limits of bandwidth."""

    def put_filled(self, filled: Filled, job: Job) -> None:
        """A whole request has a full chunk. Hold its blocks now, before the engine can reuse
        them."""

    def close_job(self, job: Job) -> None:
        """The job computes no more. It need not be a whole request."""


class Fetching(Protocol):
    """Parked jobs: they fetch KV from the store and then join the running batch."""

    @property
    def empty(self) -> bool:
        """True when no job is parked and no fetch for a job is in flight."""
        ...

    @property
    def tokens(self) -> int:
        """Number of tokens that the parked jobs will compute on this node."""
        ...

    @property
    def early_entries(self) -> int:
        """Number of inbox entries that wait for their job."""
        ...

    def is_settling(self, key: JobKey) -> bool:
        """Return whether the job was aborted and still has fetches in flight."""
        ...

    def park_job(self, job: Job, cached_blocks: int) -> None:
        """A job has arrived. Its first `cached_blocks` blocks are in this node's cache."""

    def use_lookup(self, job: Job) -> None:
        """A parked job's lookup was answered: the job has the markers."""

    def use_announcement(self, entry: InboxEntry, *, is_early: bool) -> None:
        """A prefill node announced chunks of a request, or their end. `is_early` means that the
        request's job may still arrive: keep the entry for it."""

    def settle_fetch(self, event: ChunkFetched) -> Job | None:
        """A fetch has settled. Return its job, or None for a sample, which belongs to no job. A job
        stays here until its last fetch has settled."""

    def know_first(self, job: Job) -> None:
        """The router sent FirstTokens or NoFirstTokens for a parked job."""

    def abort_job(self, job: Job) -> None:
        """Fetch nothing more for a parked job. Release its blocks when its fetches have settled."""

    def grant_blocks(self) -> None:
        """Reserve blocks for the jobs that have chunks to fetch, in the order of the engine's
        policy. Stop at the first for which too few blocks are free."""

    def give_blocks_back(self) -> None:
        """Make the last job in that order that holds blocks release them."""

    def expire_waits(self, now: float) -> None:
        """Stop waiting for those jobs whose timeout has passed; `now` is in seconds of the loop's
        clock."""

    def next_deadline(self) -> float | None:
        """Return when expire_waits() is due next, in seconds of the loop's clock; None if no job
        has a timeout."""
        ...
