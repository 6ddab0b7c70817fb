"""The planner's decisions on a real index: the newest are kept, and bad ones are left out."""

from __future__ import annotations

import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import ProtocolBroken, StoreError
from baton_kvstore.index.decisions import KEPT, KEPT_S, Decisions
from baton_kvstore.keys import decisions_key
from baton_protocol.store import ScalingDecision
from tests.support.stores.kvstore import PATIENCE_S, plain_client

pytestmark = pytest.mark.integration


def decision(at_ms: int) -> ScalingDecision:
    return ScalingDecision(at_ms=at_ms, prefill=1, decode=2, reason="Demand", message="much of it")


async def test_the_newest_decisions_are_kept_for_a_time(single: EmbeddedStore) -> None:
    key = decisions_key("kept")
    async with Decisions(single.index_url, "kept", timeout_s=PATIENCE_S) as decisions:
        assert await decisions.latest() == []
        await decisions.add([decision(1), decision(2)])
        await decisions.add([decision(2)])  # again, after an answer that was lost
        assert await decisions.latest() == [decision(2), decision(1)]
        await decisions.add([decision(at_ms) for at_ms in range(3, KEPT + 4)])
        found = await decisions.latest()
        assert [one.at_ms for one in found] == list(range(KEPT + 3, 3, -1))
        assert await decisions.latest(2) == found[:2]
        async with Decisions(single.index_url, "other", timeout_s=PATIENCE_S) as others:
            assert await others.latest() == []
    with plain_client(single.index_url) as client:
        assert 0 < client.ttl(key) <= KEPT_S


async def test_what_is_no_decision_is_left_out(single: EmbeddedStore) -> None:
    key = decisions_key("bad")
    async with Decisions(single.index_url, "bad", timeout_s=PATIENCE_S) as decisions:
        await decisions.add([decision(1)])
        with plain_client(single.index_url) as client:
            client.zadd(key, {b"\xff\x00 no record": 2.0})
        assert await decisions.latest() == [decision(1)]
        with plain_client(single.index_url) as client:
            client.set(key, "no set")
        with pytest.raises(StoreError):
            await decisions.latest()


async def test_a_server_that_sends_more_than_was_asked_for_is_not_believed(
    single: EmbeddedStore,
) -> None:
    async with Decisions(single.index_url, "many", timeout_s=PATIENCE_S) as decisions:
        await decisions.add([decision(1), decision(2)])
        with pytest.raises(ProtocolBroken, match="at most 0"):
            await decisions.latest(0)  # Redis takes the end -1 as "all"
