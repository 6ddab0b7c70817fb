"""The bounds of what streams keep on the index."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.resume_log import ResumeLog
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.resume import ResumeHead
from baton_router.requests.kept_stream import MAX_STREAM_BYTES, KeptStream
from baton_router.requests.resume_writer import MAX_KEPT_BYTES, ResumeWriter
from tests.kvstore.index.test_resume_log import HEAD
from tests.support.stores.kvstore import PATIENCE_S, plain_client

pytestmark = pytest.mark.integration

EVENT = b'data: {"text":"x"}\n\n'


def head(number: int) -> ResumeHead:
    request = msgspec.structs.replace(HEAD.request, id=RequestId(f"{number:032x}"))
    return msgspec.structs.replace(HEAD, request=request)


def delta(size: int, offset: int) -> Delta:
    return Delta(RequestId("x"), 1, 0, offset, ids=(offset,), text="x" * size)


@pytest.fixture
async def writer() -> AsyncIterator[tuple[ResumeWriter, str]]:
    with EmbeddedStore() as store:
        log = ResumeLog(store.index_url, "pool", timeout_s=PATIENCE_S)
        writer = ResumeWriter(log, time.monotonic)
        yield writer, store.index_url
        await writer.close()


async def test_a_stream_that_grows_too_large_goes_on_without_ids_and_leaves_the_index(
    writer: tuple[ResumeWriter, str],
) -> None:
    stream = KeptStream(writer[0], head(1))
    await stream.begin(head(1))
    piece = 1 << 20
    pieces = [
        await stream.keep([(0, delta(piece, at))], EVENT)
        for at in range(MAX_STREAM_BYTES // piece + 3)
    ]
    await stream.keep([], b"")
    assert pieces[0] == b"id: %032x:1\n%b" % (1, EVENT)
    assert b"id:\n" + EVENT in pieces
    assert pieces[-1] == EVENT
    with plain_client(writer[1]) as redis:
        assert redis.keys("r1:*") == []


async def test_a_router_whose_streams_fill_their_room_keeps_no_more_until_some_expire(
    writer: tuple[ResumeWriter, str],
) -> None:
    first, second = KeptStream(writer[0], head(1)), KeptStream(writer[0], head(2))
    await first.begin(head(1))
    writer[0].kept_bytes += MAX_KEPT_BYTES
    await second.begin(head(2))
    assert (first.state, second.state) == ("kept", "lost")
    assert await second.keep([(0, delta(1, 0))], EVENT) == EVENT
    writer[0].retire("others", MAX_KEPT_BYTES, 0.0)
    third = KeptStream(writer[0], head(3))
    await third.begin(head(3))
    assert third.state == "kept"


async def test_what_the_connection_does_not_take_is_sent_later_in_order(
    writer: tuple[ResumeWriter, str],
) -> None:
    stream = KeptStream(writer[0], head(1))
    await stream.begin(head(1))
    sent: list[bytes] = []

    def send(data: bytes) -> bool:
        if len(sent) == 2:
            return False
        sent.append(data)
        return True

    stream.send = send
    for at in range(4):
        stream.keep_soon([(0, delta(1, at))], EVENT)
    assert sent == []  # the index does not have their tokens yet
    last = await stream.keep([(0, delta(1, 4))], EVENT)
    numbered = [b"id: %032x:%d\n%b" % (1, number, EVENT) for number in range(1, 6)]
    assert sent == numbered[:2]
    assert last == b"".join(numbered[2:])
