"""Inbox entries that came before the job they belong to.

A prefill node may announce chunks before the router's RunJob has arrived here. Entries are kept by
(request, attempt), a bounded number of them for a bounded time, and handed over with the job.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from baton_node.engine.job import JobKey
from baton_protocol.store import InboxEntry

MAX_ENTRIES = 8192
KEEP_S = 30.0


class EarlyAnnouncements:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[JobKey, tuple[float, list[InboxEntry]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Entries kept."""
        return self._count

    def put(self, entry: InboxEntry) -> None:
        """Keep an entry; the oldest requests' go when there are too many or they are too old."""
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

    def take(self, key: JobKey) -> list[InboxEntry]:
        """What came for this job so far, in order."""
        _, entries = self._entries.pop(key, (0.0, []))
        self._count -= len(entries)
        return entries
