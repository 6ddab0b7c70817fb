"""What a pytest worker says of a test arrives in one message, in order and unchanged."""

from __future__ import annotations

import marshal
from typing import Any

from tests.support.worker_messages import Event, JoiningChannel


class Sent:
    """Stands in for execnet's channel."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def events_of_a_test(result: object) -> list[Event]:
    report = {"nodeid": "a::b", "longrepr": result, "user_properties": [("exactness", "1")]}
    return [
        ("logstart", {"nodeid": "a::b", "location": ("a", 1, "b")}),
        *(("testreport", {"data": report | {"when": when}}) for when in ("setup", "call")),
        ("logfinish", {"nodeid": "a::b", "location": ("a", 1, "b")}),
        ("runtest_protocol_complete", {"item_index": 7, "duration": 0.5}),
    ]


def test_the_events_of_a_test_are_one_message() -> None:
    sent = Sent()
    channel = JoiningChannel(sent)
    events = events_of_a_test(("a.py", 3, "Skipped"))
    for event in [("workerready", {}), *events]:
        channel.send(event)
    assert [marshal.loads(message) for message in sent.messages] == [[("workerready", {})], events]


def test_events_that_marshal_cannot_encode_are_sent_one_by_one() -> None:
    sent = Sent()
    channel = JoiningChannel(sent)
    events = events_of_a_test(object())
    for event in events:
        channel.send(event)
    assert sent.messages == events


def test_other_methods_are_the_channel_s() -> None:
    sent = Sent()
    assert JoiningChannel(sent).messages is sent.messages
