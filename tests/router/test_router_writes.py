"""How a stream's bytes are cut: what is known together is written together, and reads the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton_protocol.errors import Unavailable
from baton_protocol.ids import RequestId
from baton_protocol.link import Delta, FinishReason
from baton_router.calls import EventWriter, Head, Options, finish_members
from baton_router.errors import RequestFailed
from baton_router.outbox import Outbox
from tests.support.fake_node import FakeNode


async def chunks(port: int, **fields: Any) -> list[bytes]:
    """The chunks of an HTTP body: as the router wrote them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "x", "stream": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: router\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    found = []
    while size := int(await reader.readline(), 16):
        found.append(await reader.readexactly(size))
        await reader.readline()
    writer.close()
    return found


async def test_the_last_token_usage_and_done_are_one_write(running: Any, decode: FakeNode) -> None:
    async with running(decode) as client:
        found = await chunks(client.router.port, stream_options={"include_usage": True})
    *_, token, usage, done, rest = found[-1].split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"] > 0
    assert json.loads(token.removeprefix(b"data: "))["choices"][0]["finish_reason"] is not None


def delta(text: str, finish: FinishReason | None = None, stop: str | None = None) -> Delta:
    return Delta(RequestId("r"), 1, 0, 0, ids=(7,), text=text, finish=finish, stop=stop)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("one", [delta('a"\n\u00e9'), delta("", "stop", "x"), delta("b", "length")])
def test_an_event_of_text_alone_reads_as_any_other(one: Delta, usage: bool) -> None:
    options = Options(
        model=None,
        stream=True,
        include_usage=usage,
        continuous_usage=usage,
        return_token_ids=False,
    )
    head = Head(id="cmpl-1", created=5, model="m", fingerprint="f")
    writer = EventWriter(head, "text_completion", options, [3, 4])
    writer.count(1, one)
    choice = b'{"index":1,"text":' + json.dumps(one.text).encode() + b',"logprobs":null'
    generic = writer.event(1, choice + finish_members(one))
    written = writer.text_event(1, one)
    assert written.endswith(b"\n\n")
    assert json.loads(written.removeprefix(b"data: ")) == json.loads(
        generic.removeprefix(b"data: ")
    )
    assert writer.text_event(1, delta("")) == b""


async def test_an_outbox_is_over_when_nothing_is_left_to_take() -> None:
    outbox = Outbox(2)
    outbox.put(0, delta("a"))
    outbox.end()
    await outbox.next()
    assert not outbox.over  # the second request goes on
    outbox.put(1, delta("b"))
    outbox.end()
    assert not outbox.over  # its delta was not taken
    await outbox.next()
    assert outbox.over
    assert await outbox.next() == []


async def test_an_outbox_that_failed_is_not_over_but_raises() -> None:
    outbox = Outbox(1)
    outbox.fail(Unavailable("gone").record())
    outbox.end()
    assert not outbox.over
    with pytest.raises(RequestFailed):
        await outbox.next()
