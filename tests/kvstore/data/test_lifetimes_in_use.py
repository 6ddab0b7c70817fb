"""Markers and values of a chain that is read outlive their TTL; those of an unread chain do not."""

from __future__ import annotations

import time

import pytest

from baton_kvstore.data.tuning import Tuning
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.markers import Index
from baton_kvstore.keys import ttl_ms
from baton_protocol.ids import BlockHash
from baton_protocol.store import Marker
from tests.kvstore.conftest import MakeTransfers
from tests.support.stores.kvstore import (
    FINGERPRINT,
    PATIENCE_S,
    Transfers,
    chunk_name,
    payload_of,
    plain_client,
)

pytestmark = pytest.mark.integration

BASE_S = 10_000.0  # far longer than the test takes: only age() makes keys expire
READ = [chunk_name(number) for number in range(4)]
LEFT = [chunk_name(number) for number in range(10, 14)]


async def publish(transfers: Transfers, index: Index, chain: list[BlockHash]) -> None:
    markers = [transfers.stored(chunk, depth) for depth, chunk in enumerate(chain)]
    await index.mark_all(
        FINGERPRINT,
        [
            (chunk, marker, ttl_ms(marker.depth, BASE_S))
            for chunk, marker in zip(chain, markers, strict=True)
        ],
    )


async def look_up(index: Index, chain: list[BlockHash]) -> list[Marker]:
    """Look up a chain and extend its markers, as a node does for chunks that it fetches."""
    found = await index.lookup(FINGERPRINT, chain)
    assert None not in found
    markers = [marker for marker in found if marker is not None]
    hits = [
        (chunk, ttl_ms(marker.depth, BASE_S)) for chunk, marker in zip(chain, markers, strict=True)
    ]
    await index.refresh(FINGERPRINT, hits)
    return markers


def age(store: EmbeddedStore, seconds: float) -> None:
    """Shorten the TTL of every key in the store."""
    for url in (store.index_url, *store.data_urls):
        with plain_client(url) as client:
            for key in client.scan_iter():
                client.pexpire(key, client.pttl(key) - round(1000 * seconds))


async def test_a_chain_that_is_read_outlives_its_ttl_and_an_unread_one_does_not(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=Tuning(ttl_base_s=BASE_S))
    async with Index(single.index_url, "pool") as index:
        await publish(transfers, index, READ)
        await publish(transfers, index, LEFT)
        unread = await index.lookup(FINGERPRINT, LEFT)
        for _ in range(16):
            age(single, BASE_S / 10)
            for chunk, marker in zip(READ, await look_up(index, READ), strict=True):
                result, payload = transfers.get(chunk, marker, marker.depth)
                assert result.ok, result.reason
                assert payload == payload_of(chunk)
        assert await index.lookup(FINGERPRINT, LEFT) == [None] * 4
        for chunk, before in zip(LEFT, unread, strict=True):
            assert before is not None
            result, _ = transfers.get(chunk, before, before.depth)
            assert (result.ok, result.gone, result.reason) == (False, True, "missing")
    with plain_client(single.data_urls[0]) as client:
        assert sum(1 for key in client.scan_iter() if b"{" in key) == len(READ)


async def test_value_and_marker_get_the_ttl_of_their_depth(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    transfers = make_transfers(single.data_urls, tuning=Tuning(ttl_base_s=1000.0))
    async with Index(single.index_url, "pool") as index:
        marker = transfers.stored(READ[0], depth=64)
        await index.mark_all(FINGERPRINT, [(READ[0], marker, ttl_ms(64, 1000.0))])
    for url in (single.index_url, single.data_urls[0]):
        with plain_client(url) as client:
            (key,) = client.keys("*" + READ[0].hex() + "*")
            assert 750_000 - PATIENCE_S * 1000 < client.pttl(key) <= 750_000


async def test_a_pinned_chunk_keeps_its_lifetime_when_it_is_read(
    single: EmbeddedStore, make_transfers: MakeTransfers
) -> None:
    until = int(time.time()) + 5000
    transfers = make_transfers(single.data_urls, tuning=Tuning(ttl_base_s=1000.0))
    marker = transfers.stored(READ[0], depth=64, kept_until=until)
    assert marker.kept_until == until
    for _ in range(2):
        with plain_client(single.data_urls[0]) as client:
            (key,) = client.keys("*" + READ[0].hex() + "*")
            assert 5_000_000 - PATIENCE_S * 1000 < client.pttl(key) <= 5_000_000
        assert transfers.get(READ[0], marker, 64)[0].ok
