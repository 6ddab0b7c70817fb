"""The log of a response's events: small, and readable in any pieces."""

from __future__ import annotations

import random

import pytest

from baton_router.responses.event_log import EventLog, EventReader

EVENTS = [
    b'event: response.output_text.delta\ndata: {"sequence_number":%d,"delta":"w%d"}\n\n' % (at, at)
    for at in range(2000)
]
END = b"event: response.completed\ndata: {}\n\n"


def logged(rng: random.Random) -> EventLog:
    """All events, added some at a time, between which the log is read."""
    log, at = EventLog(), 0
    while at < len(EVENTS):
        size = rng.randrange(1, 400)
        log.add(b"".join(EVENTS[at : at + size]))
        at += size
        if rng.random() < 0.5:
            log.data()
    log.add(END)
    return log


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("seen", [0, 1, 700, 2000, 2001, 5000])
def test_a_reader_gets_each_event_after_those_that_it_has(seen: int, seed: int) -> None:
    rng = random.Random(seed)
    log = logged(rng)
    data, reader, read = log.data(), EventReader(seen), b""
    assert log.count == len(EVENTS) + 1
    assert data.startswith(log.data()[:100])
    at = 0
    while at < len(data):
        assert not reader.ended
        size = rng.randrange(1, 3000)
        read += reader.read(data[at : at + size])
        at += size
    assert read == b"".join([*EVENTS, END][seen:])
    assert (reader.count, reader.ended) == (len(EVENTS) + 1, True)


def test_what_is_read_early_is_a_beginning_of_what_is_read_later() -> None:
    log, reader = EventLog(), EventReader(0)
    assert log.data() == b""
    known = b""
    for event in EVENTS[:50]:
        log.add(event)
        assert log.data().startswith(known)
        assert reader.read(log.data(len(known))) == event, "a log ends with a whole event"
        known = log.data()
        assert log.data() == known


def test_a_log_has_a_sixth_of_the_bytes_of_its_events() -> None:
    log = EventLog()
    for event in EVENTS:
        log.add(event)
    assert len(log.data()) < sum(map(len, EVENTS)) / 6
