"""Leases on a real index: one holder at a time, until it lets go or its time is over."""

from __future__ import annotations

import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.leases import Leases
from baton_kvstore.keys import lease_key
from tests.support.stores.kvstore import PATIENCE_S, plain_client

pytestmark = pytest.mark.integration


async def test_a_lease_has_one_holder_until_it_is_released_or_expires(
    single: EmbeddedStore,
) -> None:
    async with (
        Leases(single.index_url, "pool", "a", timeout_s=PATIENCE_S) as first,
        Leases(single.index_url, "pool", "b", timeout_s=PATIENCE_S) as second,
    ):
        assert await first.hold("x", 60.0)
        assert await first.hold("x", 60.0)
        assert not await second.hold("x", 60.0)
        assert await second.hold("y", 60.0)
        await second.release("x")
        assert not await second.hold("x", 60.0)
        await first.release("x")
        assert await second.hold("x", 60.0)
        with plain_client(single.index_url) as client:
            assert 0 < client.pttl(lease_key("pool", "x")) <= 60_000
            client.pexpire(lease_key("pool", "x"), 0)
        assert await first.hold("x", 60.0)
