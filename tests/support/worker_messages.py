"""Sends what a pytest worker says of one test in one message.

xdist sends six, of which each wakes two threads of pytest's own process, in execnet's format, which
is written in Python. Here they wait for the last of them, and go in the format of marshal. If a
worker dies, pytest still knows the results of all its tests but the one that ran.
"""

from __future__ import annotations

import marshal
from typing import Any

import pytest
from xdist.remote import WorkerInteractor
from xdist.workermanage import WorkerController

# After each of these, others of the same test follow.
BEFORE_THE_LAST = ("logstart", "testreport", "logfinish")
Event = tuple[str, dict[str, Any]]


class JoiningChannel:
    """A worker's channel that joins the events of a test."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._events: list[Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def send(self, event: Event) -> None:
        self._events.append(event)
        if event[0] in BEFORE_THE_LAST:
            return
        events, self._events = self._events, []
        try:
            self._channel.send(marshal.dumps(events))
        except ValueError:  # a report holds an object: execnet knows which it can send
            for each in events:
                self._channel.send(each)


def join_messages(config: pytest.Config) -> None:
    """Join what this worker sends, and split what this process receives if it has workers."""
    interactors = [
        plugin
        for plugin in config.pluginmanager.get_plugins()
        if isinstance(plugin, WorkerInteractor)
    ]
    for interactor in interactors:
        interactor.channel = JoiningChannel(interactor.channel)
    if not interactors:
        _split_messages()


def _split_messages() -> None:
    process = WorkerController.process_from_remote

    def process_each(self: WorkerController, message: Any) -> None:
        for event in marshal.loads(message) if isinstance(message, bytes) else [message]:
            process(self, event)

    WorkerController.process_from_remote = process_each
