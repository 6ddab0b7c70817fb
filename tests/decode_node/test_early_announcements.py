"""Inbox entries that arrive before their job."""

from __future__ import annotations

from baton_decode_node import early_announcements
from baton_decode_node.early_announcements import EarlyAnnouncements
from baton_protocol.ids import RequestId
from baton_protocol.store import InboxEntry
from tests.support.clock import Clock


def entry(name: str, attempt: int = 1, first: int = 0) -> InboxEntry:
    return InboxEntry(RequestId(name), attempt, "chunks", first)


def test_a_job_gets_its_entries_once_and_in_order() -> None:
    early = EarlyAnnouncements(Clock())
    for first in (2, 0, 1):
        early.add_entry(entry("r", first=first))
    early.add_entry(entry("other"))
    assert [each.first for each in early.take_entries((RequestId("r"), 1))] == [2, 0, 1]
    assert early.take_entries((RequestId("r"), 1)) == []
    assert len(early) == 1


def test_an_attempt_does_not_get_the_entries_of_another() -> None:
    early = EarlyAnnouncements(Clock())
    early.add_entry(entry("r", attempt=1))
    assert early.take_entries((RequestId("r"), 2)) == []


def test_a_new_entry_drops_entries_that_are_too_old() -> None:
    clock = Clock()
    early = EarlyAnnouncements(clock)
    early.add_entry(entry("old"))
    clock.advance(early_announcements.KEEP_S + 1)
    early.add_entry(entry("new"))
    assert early.take_entries((RequestId("old"), 1)) == []
    assert len(early) == 1


def test_the_oldest_entries_are_dropped_when_there_are_too_many() -> None:
    early = EarlyAnnouncements(Clock())
    for number in range(early_announcements.MAX_ENTRIES + 5):
        early.add_entry(entry(f"r{number}"))
    assert len(early) == early_announcements.MAX_ENTRIES
    assert early.take_entries((RequestId("r4"), 1)) == []
    assert len(early.take_entries((RequestId("r5"), 1))) == 1
