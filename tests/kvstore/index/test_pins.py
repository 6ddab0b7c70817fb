"""Pinned prefixes on a real index."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.pins import Pins
from baton_kvstore.keys import LONGEST_PIN_S, pin_key, pins_key
from baton_protocol.store import PinnedPrefix
from tests.support.stores.kvstore import PATIENCE_S, plain_client

pytestmark = pytest.mark.integration

A, B = "a" * 16, "b" * 16


def record(id: str, changed: int, *, removed: bool = False) -> PinnedPrefix:
    ids = () if removed else tuple(range(100))
    return PinnedPrefix(
        id=id, model="m", tokenizer="t", prompt_ids=ids, until=9, changed=changed, removed=removed
    )


@pytest.fixture
async def pins(single: EmbeddedStore) -> AsyncIterator[Pins]:
    async with Pins(single.index_url, "pool", timeout_s=PATIENCE_S) as opened:
        yield opened


async def test_a_reader_gets_the_records_that_changed_since_it_knew_them(pins: Pins) -> None:
    assert await pins.list_ids() == {}
    for each in (record(A, 1), record(B, 2), record(A, 3, removed=True)):
        await pins.put(each, 60.0)
    listed = await pins.list_ids()
    assert listed == {A: 3, B: 2}
    assert await pins.read_changed(listed, {}) == [record(A, 3, removed=True), record(B, 2)]
    assert await pins.read_changed(listed, {A: 1, B: 2}) == [record(A, 3, removed=True)]
    assert await pins.read_changed(listed, listed) == []


async def test_each_key_expires_and_an_expired_record_leaves_the_list(
    pins: Pins, single: EmbeddedStore
) -> None:
    await pins.put(record(A, 1), 60.0)
    await pins.put(record(B, 2), 1e9)
    with plain_client(single.index_url) as client:
        assert 0 < client.pttl(pin_key("pool", A)) <= 60_000
        for key in (pin_key("pool", B), pins_key("pool")):
            assert 0 < client.pttl(key) <= LONGEST_PIN_S * 1000
        client.pexpire(pin_key("pool", A), 0)
    assert await pins.read_changed(await pins.list_ids(), {B: 2}) == []
    assert await pins.list_ids() == {B: 2}


async def test_a_record_that_cannot_be_read_is_left_out(pins: Pins, single: EmbeddedStore) -> None:
    await pins.put(record(A, 1), 60.0)
    with plain_client(single.index_url) as client:
        client.set(pin_key("pool", A), b"\xc1")
        client.hset(pins_key("pool"), "odd", "soon")
    await pins.put(msgspec.structs.replace(record(B, 2), tenant="acme"), 60.0)
    assert [each.id for each in await pins.read_changed(await pins.list_ids(), {})] == [B]
