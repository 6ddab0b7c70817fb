"""What streams keep on the index, when, and its bounds."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Sequence

import msgspec
import pytest

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.resume_log import Append, ResumeLog
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta
from baton_protocol.resume import NO_TOKENS, ResumeHead, digest_after
from baton_router.requests.kept_stream import MAX_STREAM_BYTES, KeptStream
from baton_router.requests.resume_writer import MAX_KEPT_BYTES, ResumeWriter
from tests.kvstore.index.test_resume_log import HEAD
from tests.support.stores.kvstore import PATIENCE_S, plain_client
from tests.support.waiting import until

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


# --- repeatable streams ---------------------------------------------------------------------------


def repeatable(number: int) -> ResumeHead:
    return msgspec.structs.replace(head(number), repeatable=True)


async def test_events_of_a_repeatable_stream_leave_at_once_and_their_deltas_are_one_entry(
    writer: tuple[ResumeWriter, str],
) -> None:
    streams = [KeptStream(writer[0], repeatable(number)) for number in (1, 2)]
    commands = await appended(writer[0], [stream.begin(stream.head) for stream in streams])
    assert commands == 1
    for at in range(4):
        for stream in streams:
            data = stream.keep_later(delta(1, at), EVENT)
            assert re.fullmatch(
                b"id: %b:%d:[0-9a-f]{1,8}\n%b" % (stream.id.encode(), at + 1, EVENT), data
            )
    streams[0].close()  # before its deltas are written
    commands = await appended(writer[0], [until(lambda: not writer[0].behind)])
    assert commands == 1
    for stream in streams:
        claim = await writer[0].log.claim(stream.id, 1000)
        assert claim is not None
        [entry] = claim.entries
        assert [kept.ids for kept in entry.all_deltas()] == [(0,), (1,), (2,), (3,)]
    assert [stream.state for stream in streams] == ["closed", "kept"]


async def test_a_delta_that_no_other_attempt_repeats_waits_with_all_before_it(
    writer: tuple[ResumeWriter, str],
) -> None:
    stream = KeptStream(writer[0], repeatable(1))
    await stream.begin(stream.head)
    stream.keep_later(delta(1, 0), EVENT)
    end = msgspec.structs.replace(delta(1, 1), ids=(), finish="stop")
    poured = stream.pour([(0, delta(1, 1)), (0, delta(1, 2))], lambda batch: EVENT)
    assert poured is not None
    assert re.findall(rb"^id: \w+:(\d+):", poured, re.MULTILINE) == [b"2", b"3"]
    assert stream.pour([(0, end)], lambda batch: EVENT) is None
    assert b":4:" in await stream.keep([(0, end)], EVENT)
    claim = await writer[0].log.claim(stream.id, 1000)
    assert claim is not None
    assert len(claim.entries) == 2


@pytest.mark.parametrize("taken", [False, True])
async def test_a_repeatable_stream_whose_deltas_cannot_be_written_ends_its_promise(
    writer: tuple[ResumeWriter, str], taken: bool
) -> None:
    stream = KeptStream(writer[0], repeatable(1))
    await stream.begin(stream.head)
    assert stream.keep_later(delta(1, 0), EVENT).startswith(b"id: ")
    with plain_client(writer[1]) as redis:
        if taken:
            await writer[0].log.claim(stream.id, 1000)
        else:
            redis.flushall()
    stream.write_out()
    await writer[0].written()
    assert stream.state == ("taken" if taken else "lost")
    assert writer[0].live == {}
    if not taken:
        assert stream.keep_later(delta(1, 1), EVENT) == b"id:\n" + EVENT
        assert stream.keep_later(delta(1, 2), EVENT) == EVENT
    stream.close()
    assert writer[0].kept_bytes > 0
    assert writer[0].has_room(0)


async def appended(writer: ResumeWriter, work: Sequence[Awaitable[object]]) -> int:
    """Do the work at once. Return how many commands it took."""
    commands, append = 0, writer.log.append

    async def counted(appends: Sequence[Append]) -> list[int]:
        nonlocal commands
        commands += 1
        return await append(appends)

    writer.log.append = counted  # type: ignore[method-assign]
    await asyncio.gather(*work)
    await writer.written()
    writer.log.append = append  # type: ignore[method-assign]
    return commands


def test_the_digest_of_tokens_differs_if_one_does() -> None:
    ids = [5, 0, 0, 7, 151_000]
    digests = {digest_after(NO_TOKENS, ids[:count]) for count in range(len(ids) + 1)}
    for at in range(len(ids)):
        for other in range(300):
            digests.add(digest_after(NO_TOKENS, [*ids[:at], 200_000 + other, *ids[at + 1 :]]))
    assert len(digests) == len(ids) + 1 + 300 * len(ids)
    assert digest_after(digest_after(NO_TOKENS, ids[:2]), ids[2:]) == digest_after(NO_TOKENS, ids)
