"""Kept responses on a real index: tenants, lifetimes, bounds, and leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.responses import OVERHEAD_BYTES, ResponseLimits, Responses
from baton_kvstore.keys import response_key, response_sizes_key, responses_key
from tests.support.stores.kvstore import PATIENCE_S, plain_client

pytestmark = pytest.mark.integration

A, B, C, D = (f"resp_{letter * 32}" for letter in "abcd")
ROOMY = ResponseLimits(ttl_s=60.0, tenant_bytes=1 << 20, all_bytes=1 << 20)
SIZE = OVERHEAD_BYTES + 100  # of each response in tests of bounds
VALUE = {"response": b"x" * 92}
Open = Callable[[ResponseLimits], Responses]


@pytest.fixture
async def opened(single: EmbeddedStore) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        def open_one(limits: ResponseLimits) -> Responses:
            one = Responses(single.index_url, "pool", limits, timeout_s=PATIENCE_S)
            stack.push_async_callback(one.close)
            return one

        yield open_one


async def test_a_tenant_reads_and_deletes_its_own_responses_alone(opened: Open) -> None:
    writer, reader = opened(ROOMY), opened(ROOMY)
    assert await writer.put("acme", A, {"response": b"1", "input": b"2"})
    assert await reader.get("acme", A, "input", "response") == [b"2", b"1"]
    assert await reader.get("acme", A, "input", "unknown") is None
    assert await reader.get("other", A, "input") is None
    assert not await reader.delete("other", A)
    assert await writer.put("acme", A, {"response": b"3"})
    assert await reader.get("acme", A, "response") == [b"3"]
    assert await reader.delete("acme", A)
    assert not await reader.delete("acme", A)
    assert await reader.get("acme", A, "response") is None


async def test_each_key_expires_and_what_has_expired_gives_its_room_back(
    opened: Open, single: EmbeddedStore
) -> None:
    brief = opened(ResponseLimits(ttl_s=0.2, tenant_bytes=2 * SIZE, all_bytes=2 * SIZE))
    long = opened(ResponseLimits(ttl_s=60.0, tenant_bytes=2 * SIZE, all_bytes=2 * SIZE))
    await brief.put("", A, VALUE)
    await long.put("", B, VALUE)
    with plain_client(single.index_url) as client:
        for key in (responses_key("pool"), response_sizes_key("pool"), response_key("pool", "", B)):
            assert 0 < client.pttl(key) <= 60_000
        await asyncio.sleep(0.25)
        assert await long.get("", A, "response") is None
        await long.put("", C, VALUE)
        assert await long.get("", B, "response") is not None
        assert sorted(client.hgetall(response_sizes_key("pool"))) == [
            *(b"*", b":" + B.encode(), b":" + C.encode(), b"=")
        ]


@pytest.mark.parametrize(
    ("own", "all_", "kept"),
    [(10, 3, ["b", "c", "d"]), (2, 10, ["a", "c", "d"]), (2, 2, ["c", "d"]), (10, 10, "abcd")],
)
async def test_the_oldest_responses_go_first_of_a_tenant_and_of_all(
    opened: Open, own: int, all_: int, kept: list[str]
) -> None:
    limits = ResponseLimits(ttl_s=60.0, tenant_bytes=own * SIZE, all_bytes=all_ * SIZE)
    responses = opened(limits)
    given = (("a", "one", A), ("b", "two", B), ("c", "two", C), ("d", "two", D))
    for _, tenant, id in given:
        assert await responses.put(tenant, id, VALUE)
    found = [
        letter
        for letter, tenant, id in (
            ("a", "one", A),
            ("b", "two", B),
            ("c", "two", C),
            ("d", "two", D),
        )
        if await responses.get(tenant, id, "response") is not None
    ]
    assert found == list(kept)


async def test_one_that_is_larger_than_a_tenants_room_is_not_written(opened: Open) -> None:
    responses = opened(ResponseLimits(ttl_s=60.0, tenant_bytes=SIZE, all_bytes=10 * SIZE))
    assert await responses.put("", A, VALUE)
    assert not await responses.put("", B, {"response": b"x" * 101})
    assert await responses.get("", A, "response") is not None
    assert not await responses.put("", A, {"response": b"x" * 101})
    assert await responses.get("", A, "response") is None, "not the older one instead"


@pytest.mark.parametrize(
    ("start", "data", "done", "value"),
    [
        (3, b"def", True, b"abcdef"),
        (1, b"bcde", True, b"abcde"),
        (0, b"ab", True, b"abc"),
        (3, b"", True, b"abc"),
        (4, b"ef", False, b"abc"),
        (3, b"\x00\xff", True, b"abc\x00\xff"),
    ],
)
async def test_a_value_goes_on_and_never_loses_bytes(
    opened: Open, single: EmbeddedStore, start: int, data: bytes, done: bool, value: bytes
) -> None:
    responses = opened(ROOMY)
    await responses.put("", A, {"events": b"abc"})
    assert await responses.append("", A, "events", start, data) is done
    assert await responses.get("", A, "events") == [value]
    for at in range(6):
        assert await responses.read("", A, "events", at, 2) == value[at : at + 2]
    with plain_client(single.index_url) as client:
        sizes = client.hgetall(response_sizes_key("pool"))
    assert {int(size) for size in sizes.values()} == {OVERHEAD_BYTES + len(value)}
    await responses.delete("", A)
    assert not await responses.append("", A, "events", 0, b"x")
    assert await responses.read("", A, "events", 0, 2) is None


async def test_a_value_that_goes_on_takes_the_room_of_older_responses_and_not_more(
    opened: Open,
) -> None:
    limits = ResponseLimits(ttl_s=60.0, tenant_bytes=3 * SIZE, all_bytes=3 * SIZE)
    responses = opened(limits)
    for id in (A, B, C):
        assert await responses.put("", id, VALUE)
        await asyncio.sleep(0.002)  # so that one is older
    assert not await responses.append("", A, "response", 92, b"x" * 30), "it is the oldest itself"
    assert await responses.append("", C, "response", 92, b"x" * SIZE)
    kept = [await responses.get("", id, "response") is not None for id in (A, B, C)]
    assert kept == [False, True, True]
    assert not await responses.append("", C, "response", 92 + SIZE, b"x" * 2 * SIZE)


async def test_a_lease_ends_and_carries_a_request_to_cancel(opened: Open) -> None:
    maker, other = opened(ROOMY), opened(ROOMY)
    assert not await other.cancel("", A)
    assert not await maker.lease("", A, 60.0)
    assert await other.is_leased("", A)
    assert not await other.is_leased("acme", A)
    assert await other.cancel("", A)
    assert await maker.lease("", A, 60.0)
    await maker.release("", A)
    assert not await other.is_leased("", A)
    await maker.lease("", A, 0.05)
    await asyncio.sleep(0.1)
    assert not await other.is_leased("", A)
