"""Inbox entries that arrived before their job, kept until it arrives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from baton_node.engine.job import JobKey
from baton_protocol.store import InboxEntry

MAX_ENTRIES = 8192
KEEP_S = 30.0


class EarlyAnnouncements:
    """Inbox entries that arrived before their job.

    A prefill node may announce chunks before the router's RunJob arrives here. Entries are kept by
    (request, attempt) until the job arrives: at most MAX_ENTRIES entries, for at most KEEP_S
    seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[JobKey, tuple[float, list[InboxEntry]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Number of entries kept."""
        return self._count

    def add_entry(self, entry: InboxEntry) -> None:
        """Keep an entry. If there are too many, or old ones, drop those of the oldest requests."""
        now = self._clock()
        _, entries = self._entries.setdefault((entry.request, entry.attempt), (now, []))
        entries.append(entry)
        self._count += 1
        while self._entries:
            since, oldest = next(iter(self._entries.values()))
            if self._count <= MAX_ENTRIES and now - since <= KEEP_S:
                return
            self._entries.popitem(last=False)
            self._count -= len(oldest)

    def take_entries(self, key: JobKey) -> list[InboxEntry]:
        """Remove and return the entries of this job, in order of arrival."""
        _, entries = self._entries.pop(key, (0.0, []))
        self._count -= len(entries)
        return entries
