"""Inbox entries that come before their job."""

from __future__ import annotations

from baton_decode_node import fetch_state as module
from baton_decode_node.fetch_state import EarlyAnnouncements
from baton_protocol.ids import RequestId
from baton_protocol.store import InboxEntry
from tests.support.clock import Clock


def entry(name: str, attempt: int = 1, first: int = 0) -> InboxEntry:
    return InboxEntry(RequestId(name), attempt, "chunks", first)


def test_entries_are_given_to_their_job_once_and_in_order() -> None:
    stash = EarlyAnnouncements(Clock())
    for first in (2, 0, 1):
        stash.put(entry("r", first=first))
    stash.put(entry("other"))
    assert [each.first for each in stash.take((RequestId("r"), 1))] == [2, 0, 1]
    assert stash.take((RequestId("r"), 1)) == []
    assert len(stash) == 1


def test_attempts_are_kept_apart() -> None:
    stash = EarlyAnnouncements(Clock())
    stash.put(entry("r", attempt=1))
    assert stash.take((RequestId("r"), 2)) == []


def test_old_entries_go_when_new_ones_come() -> None:
    clock = Clock()
    stash = EarlyAnnouncements(clock)
    stash.put(entry("old"))
    clock.advance(module.KEEP_S + 1)
    stash.put(entry("new"))
    assert stash.take((RequestId("old"), 1)) == []
    assert len(stash) == 1


def test_the_oldest_go_when_there_are_too_many() -> None:
    stash = EarlyAnnouncements(Clock())
    for number in range(module.MAX_ENTRIES + 5):
        stash.put(entry(f"r{number}"))
    assert len(stash) == module.MAX_ENTRIES
    assert stash.take((RequestId("r4"), 1)) == []
    assert len(stash.take((RequestId("r5"), 1))) == 1
