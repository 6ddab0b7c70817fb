"""The planner's decisions on their way to a real index, and that a failing write costs nothing."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import redis

from baton_kvstore.connection.endpoint import with_login
from baton_kvstore.index.decisions import KEPT, Decisions
from baton_kvstore.keys import decisions_key
from baton_operator.state.decision_log import LONGEST_MESSAGE, DecisionLog
from baton_operator.state.index_reader import IndexReader
from baton_operator.state.observed import Planned
from tests.operator.index_servers import LOCAL, LOGIN, PASSWORD, PATIENT_S, external, register
from tests.support.clock import Clock
from tests.support.planner.observations import observed

pytestmark = pytest.mark.integration

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def planned(prefill: int, message: str = "many prompts") -> Planned:
    return Planned(mode="auto", prefill=prefill, decode=1, reason="Demand", message=message)


async def test_decisions_are_written_once_to_the_index_that_answers(redis_url: str) -> None:
    pool, log, clock = external(redis_url), DecisionLog(), Clock()
    url = with_login(redis_url, "", PASSWORD)
    await register(url, pool)
    reader = IndexReader(clock, PATIENT_S, LOCAL, decisions=log)
    log.note(planned(1), AT)
    log.note(planned(2), AT.replace(second=6))
    assert await reader.read(pool, observed(pool), None, LOGIN) is not None
    assert log.unwritten == ()
    async with Decisions(url, pool.key, timeout_s=PATIENT_S) as decisions:
        found = await decisions.latest()
    assert [(one.prefill, one.reason, one.message) for one in found] == [
        (2, "Demand", "many prompts"),
        (1, "Demand", "many prompts"),
    ]
    assert found[1].at_ms == 1000 * int(AT.timestamp())


async def test_a_failing_write_keeps_the_decisions_and_the_answer(redis_url: str) -> None:
    pool, log, clock = external(redis_url), DecisionLog(), Clock()
    url = with_login(redis_url, "", PASSWORD)
    await register(url, pool)
    reader = IndexReader(clock, PATIENT_S, LOCAL, decisions=log)
    with redis.Redis.from_url(url) as client:
        client.set(decisions_key(pool.key), "of another type")
        log.note(planned(1), AT)
        assert await reader.read(pool, observed(pool), None, LOGIN) is not None
        assert len(log.unwritten) == 1
        assert not reader.silent
        client.delete(decisions_key(pool.key))
    clock.advance(3600.0)
    assert await reader.read(pool, observed(pool), None, LOGIN) is not None
    assert list(log.unwritten) == []


def test_a_log_without_an_index_keeps_the_last_decisions_with_short_messages() -> None:
    log = DecisionLog()
    for prefill in range(KEPT + 5):
        log.note(planned(prefill, "x" * (2 * LONGEST_MESSAGE)), AT)
    assert [one.prefill for one in log.unwritten] == list(range(5, KEPT + 5))
    assert {len(one.message) for one in log.unwritten} == {LONGEST_MESSAGE}
