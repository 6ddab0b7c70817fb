"""One line when trouble begins, one when it is over, whatever comes and goes between."""

from __future__ import annotations

import time

import pytest

from baton_kvstore.data.health import Health

AWAY = "data instance 3 cannot be used: gone"
FULL = "data instance 3 cannot be used: full"
BACK = "data instance 3 can be used again"


def nothing() -> None:
    pass


def lost(health: Health) -> None:
    health.lost("gone", time.monotonic())


def refused(health: Health) -> None:
    health.refused("full", time.monotonic())


@pytest.fixture
def health() -> Health:
    return Health(3, 0.1, 0.5, nothing)


def test_a_server_that_goes_and_comes_is_told_of_twice(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    health.reached()
    for _ in range(3):
        lost(health)
    assert (health.server.reason, health.put_trouble) == ("gone", "gone")
    health.reached()
    assert health.put_trouble == ""
    assert caplog.messages == [AWAY, BACK]


def test_room_that_comes_and_goes_is_told_of_once_until_a_put_has_worked(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        refused(health)
        assert (health.server.reason, health.put_trouble) == ("", "full")
        health.has_room()
        assert health.put_trouble == ""
    assert caplog.messages == [FULL]
    health.took_put()
    health.took_put()
    assert caplog.messages == [FULL, BACK]


def test_a_server_that_goes_while_its_room_is_on_trial_is_told_of(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    refused(health)
    health.has_room()
    lost(health)
    health.reached()
    health.took_put()
    assert caplog.messages == [FULL, AWAY, BACK]


def test_what_fails_after_the_close_was_cut_off_by_us(
    health: Health, caplog: pytest.LogCaptureFixture
) -> None:
    health.close()
    lost(health)
    refused(health)
    assert health.put_trouble == ""
    assert caplog.messages == []


def test_each_change_is_passed_on() -> None:
    calls: list[int] = []
    health = Health(0, 0.1, 0.5, lambda: calls.append(1))
    lost(health)
    health.reached()
    refused(health)
    health.has_room()
    health.took_put()
    assert len(calls) == 5
    health.took_put()  # nothing new
    assert len(calls) == 5
