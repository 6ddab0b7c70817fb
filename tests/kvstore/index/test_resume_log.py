"""Logs of resumable streams on a real index."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.resume_log import (
    BEGIN,
    DELETE,
    FENCED,
    FIRST_FENCE,
    GONE,
    KEPT,
    Append,
    ResumeLog,
)
from baton_kvstore.keys import resume_key
from baton_protocol.ids import Fingerprint, RequestId
from baton_protocol.request import Request
from baton_protocol.resume import KeptDelta, ResumeEntry, ResumeHead
from baton_protocol.sampling import SamplingParams
from baton_protocol.store import Kind
from tests.support.stores.kvstore import PATIENCE_S, plain_client

pytestmark = pytest.mark.integration

ID = "a" * 32
KEY = resume_key("pool", ID)
LIFE_MS = 60_000
HEAD = ResumeHead(
    route="/v1/completions",
    body=b'{"prompt":"\xc3\xa9"}',
    model="m",
    kind=Kind(Fingerprint("f"), "t", "x"),
    created=7,
    seconds=58,
    request=Request(
        id=RequestId(ID),
        attempt=1,
        prompt_ids=(1, 2),
        params=SamplingParams(seed=3),
        outputs=((),),
    ),
)
ENTRIES = [ResumeEntry(deltas=(KeptDelta(0, (at,), f"text {at}\n"),), cached=at) for at in range(3)]


@pytest.fixture
async def log(single: EmbeddedStore) -> AsyncIterator[ResumeLog]:
    async with ResumeLog(single.index_url, "pool", timeout_s=PATIENCE_S) as opened:
        assert await opened.append([begin(opened)]) == [KEPT]
        yield opened


def begin(log: ResumeLog, fence: int = FIRST_FENCE, head: ResumeHead = HEAD) -> Append:
    return (ID, fence, BEGIN, LIFE_MS, log.encode_head(head))


def append(log: ResumeLog, at: int, fence: int = FIRST_FENCE) -> Append:
    return (ID, fence, at, LIFE_MS, log.encode(ENTRIES[at]))


async def test_a_reader_gets_head_and_entries_in_order_and_each_entry_once(log: ResumeLog) -> None:
    first, second, third = (append(log, at) for at in range(3))
    assert await log.append([first, second]) == [KEPT, KEPT]
    # As a client does whose connection broke before the reply.
    assert await log.append([first, second, third]) == [KEPT, KEPT, KEPT]
    assert await log.head(ID) == HEAD
    claim = await log.claim(ID, LIFE_MS)
    assert claim is not None
    assert claim.entries == ENTRIES


async def test_an_earlier_owner_changes_nothing(log: ResumeLog) -> None:
    await log.append([append(log, 0)])
    claim = await log.claim(ID, LIFE_MS)
    assert claim is not None
    delete = (ID, FIRST_FENCE, DELETE, LIFE_MS, b"")
    assert await log.append([append(log, 1), delete]) == [FENCED, FENCED]
    assert await log.append([begin(log)]) == [FENCED]
    changed = msgspec.structs.replace(HEAD, repeatable=True)
    appends = [begin(log, claim.fence, changed), append(log, 1, claim.fence)]
    assert await log.append(appends) == [KEPT, KEPT]
    assert await log.head(ID) == changed
    again = await log.claim(ID, LIFE_MS)
    assert again is not None
    assert again.entries == ENTRIES[:2]
    assert again.fence > claim.fence


async def test_an_entry_after_a_missing_one_is_not_kept(log: ResumeLog) -> None:
    assert await log.append([append(log, 1)]) == [GONE]


async def test_each_key_expires_after_the_last_append_or_renewal(
    log: ResumeLog, single: EmbeddedStore
) -> None:
    await log.append([append(log, 0)])
    with plain_client(single.index_url) as client:
        for key in (KEY, KEY + b":log"):
            assert 0 < client.pttl(key) <= LIFE_MS
        await log.append([(ID, FIRST_FENCE, 0, 2 * LIFE_MS, b"")])
        for key in (KEY, KEY + b":log"):
            assert LIFE_MS < client.pttl(key) <= 2 * LIFE_MS
        client.pexpire(KEY, 0)
        client.pexpire(KEY + b":log", 0)
    assert await log.append([append(log, 1)]) == [GONE]
    assert await log.head(ID) is None
    assert await log.claim(ID, LIFE_MS) is None


async def test_a_deleted_stream_leaves_nothing(log: ResumeLog, single: EmbeddedStore) -> None:
    await log.append([append(log, 0), (ID, FIRST_FENCE, DELETE, LIFE_MS, b"")])
    with plain_client(single.index_url) as client:
        assert client.keys("r1:*") == []


async def test_what_cannot_be_read_is_no_stream(log: ResumeLog, single: EmbeddedStore) -> None:
    with plain_client(single.index_url) as client:
        client.rpush(KEY + b":log", b"\xc1")
        client.hset(KEY, "head", b"\xc1")
    assert await log.head(ID) is None
    assert await log.claim(ID, LIFE_MS) is None
