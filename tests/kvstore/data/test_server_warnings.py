"""ServerCheck logs one warning when trouble begins and one when it is over."""

from __future__ import annotations

import time

import pytest

from baton_kvstore.data.server_check import ServerCheck
from tests.support.stores.kvstore import shared_by_instances

LOST = "data instance 3 cannot be used: gone"
FULL = "data instance 3 cannot be used: full"
BACK = "data instance 3 can be used again"


def nothing() -> None:
    pass


def lost(check: ServerCheck) -> None:
    check.note_lost("gone", time.monotonic())


def refused(check: ServerCheck) -> None:
    check.note_refused_put("full", time.monotonic())


@pytest.fixture
def check() -> ServerCheck:
    return ServerCheck(3, [], shared_by_instances(), nothing)


def test_one_warning_when_a_server_is_lost_and_one_when_it_returns(
    check: ServerCheck, caplog: pytest.LogCaptureFixture
) -> None:
    check.note_reached(time.monotonic())
    for _ in range(3):
        lost(check)
    assert (check.trouble, check.put_trouble) == ("gone", "gone")
    check.note_reached(time.monotonic())
    assert check.put_trouble == ""
    assert caplog.messages == [LOST, BACK]


def test_repeated_refusals_cause_one_warning_until_a_put_succeeds(
    check: ServerCheck, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        refused(check)
        assert (check.trouble, check.put_trouble) == ("", "full")
        check.note_room(time.monotonic())
        assert check.put_trouble == ""
    assert caplog.messages == [FULL]
    check.note_put()
    check.note_put()
    assert caplog.messages == [FULL, BACK]


def test_a_server_lost_while_its_room_is_on_trial_causes_a_warning(
    check: ServerCheck, caplog: pytest.LogCaptureFixture
) -> None:
    refused(check)
    check.note_room(time.monotonic())
    lost(check)
    check.note_reached(time.monotonic())
    check.note_put()
    assert caplog.messages == [FULL, LOST, BACK]


def test_failures_after_the_close_cause_no_warning(
    check: ServerCheck, caplog: pytest.LogCaptureFixture
) -> None:
    check.close()
    lost(check)
    refused(check)
    assert check.put_trouble == ""
    assert caplog.messages == []


def test_each_change_calls_changed() -> None:
    calls: list[int] = []
    check = ServerCheck(0, [], shared_by_instances(), lambda: calls.append(1))
    lost(check)
    check.note_reached(time.monotonic())
    refused(check)
    check.note_room(time.monotonic())
    check.note_put()
    assert len(calls) == 5
    check.note_put()  # no change
    assert len(calls) == 5
