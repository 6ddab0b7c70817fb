"""Pauses before restarts."""

from __future__ import annotations

from baton_protocol.backoff import Backoff


def test_pauses_double_up_to_a_limit_and_reset_once_the_process_has_worked() -> None:
    backoff = Backoff(0.5, 15.0)
    assert [backoff.next_pause_s() for _ in range(7)] == [0.5, 1, 2, 4, 8, 15, 15]
    backoff.reset()
    assert [backoff.next_pause_s(), backoff.next_pause_s()] == [0.5, 1]
