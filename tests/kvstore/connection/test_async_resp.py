"""AsyncResp, the asyncio connection to the index: logins, timeouts and misbehaving servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from baton_kvstore.connection.async_resp import AsyncResp
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp import pack
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.errors import LinkBroken, LinkTimeout, ProtocolBroken, ServerRefused
from tests.support.stores.kvstore import frozen, held_down, plain_client, wait_until

pytestmark = pytest.mark.integration

Open = Callable[..., AsyncResp]
Serve = Callable[..., Awaitable[str]]


@pytest.fixture
async def answering() -> AsyncIterator[Serve]:
    """Return a function that starts a server, which answers each request with the next of the
    given answers; b"" closes the connection."""
    handlers: list[asyncio.Task[None]] = []

    async def serve(
        answers: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while await reader.read(1 << 16) and answers and (answer := answers.pop(0)):
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with AsyncExitStack() as stack:

        async def start(*answers: bytes) -> str:
            left = list(answers)

            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                handlers.append(asyncio.create_task(serve(left, reader, writer)))

            listening = await asyncio.start_server(connected, "127.0.0.1", 0)
            server = await stack.enter_async_context(listening)
            return f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        yield start
        async with asyncio.timeout(120):
            await asyncio.gather(*handlers, return_exceptions=True)


@pytest.fixture
async def opened(answering: Serve) -> AsyncIterator[Open]:
    """Return a function that makes connections; they are closed before the servers stop."""
    made: list[AsyncResp] = []

    def make(url: str, timeout_s: float = 20.0) -> AsyncResp:
        link = AsyncResp(parse_endpoint(url), timeout_s=timeout_s, connect_timeout_s=timeout_s)
        made.append(link)
        return link

    yield make
    for link in made:
        link.close()


async def test_a_refusal_keeps_the_connection(opened: Open, single: EmbeddedStore) -> None:
    link = opened(single.index_url)
    await link.command(b"CLIENT", b"SETNAME", b"lookups")
    with pytest.raises(ServerRefused, match="unknown command"):
        await link.command(b"NO-SUCH")
    assert await link.command(b"CLIENT", b"GETNAME") == b"lookups"


async def test_a_request_on_a_connection_that_died_while_idle_is_retried(
    opened: Open, single: EmbeddedStore
) -> None:
    link = opened(single.index_url)
    assert await link.command(b"ECHO", b"1") == b"1"
    with plain_client(single.index_url) as client:
        client.client_kill_filter(_type="normal", skipme=True)
    assert await link.command(b"ECHO", b"2") == b"2"


async def test_a_server_that_is_down_is_an_error_and_is_used_again_after_its_restart(
    opened: Open, single: EmbeddedStore
) -> None:
    link = opened(single.index_url)
    await link.command(b"ECHO", b"1")
    with held_down(single, "index"), pytest.raises(LinkBroken, match="cannot reach Redis at unix"):
        await link.command(b"ECHO", b"2")
    wait_until(lambda: single.pid("index") > 0, "the index to be started")
    for _ in range(2000):
        try:
            assert await link.command(b"ECHO", b"3") == b"3"
            return
        except LinkBroken:
            await asyncio.sleep(0.05)
    pytest.fail("the connection did not use the restarted server")


async def test_the_reply_of_a_cancelled_request_reaches_no_other_caller(
    opened: Open, single: EmbeddedStore
) -> None:
    link = opened(single.index_url)
    await link.command(b"ECHO", b"1")
    with frozen(single.pid("index")):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await link.command(b"ECHO", b"2")
        waiting = [asyncio.create_task(link.command(b"ECHO", b"%d" % n)) for n in range(3, 9)]
        await asyncio.sleep(0.05)
        waiting[0].cancel()
        waiting[3].cancel()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert [answers[place] for place in (1, 2, 4, 5)] == [b"4", b"5", b"7", b"8"]
    assert {type(answers[0]), type(answers[3])} == {asyncio.CancelledError}


async def test_all_callers_of_a_frozen_server_fail_within_one_timeout(
    opened: Open, single: EmbeddedStore
) -> None:
    link = opened(single.index_url, timeout_s=2.0)
    await link.command(b"ECHO", b"1")
    with frozen(single.pid("index")):
        async with asyncio.timeout(120):  # one after the other would take 200 s
            answers = await asyncio.gather(
                *(link.command(b"ECHO", b"2") for _ in range(100)), return_exceptions=True
            )
    assert {type(answer) for answer in answers} == {LinkTimeout}


async def test_closing_fails_waiting_callers_and_opens_no_new_connection(
    opened: Open, single: EmbeddedStore
) -> None:
    link = opened(single.index_url)
    await link.command(b"ECHO", b"1")
    with frozen(single.pid("index")):
        waiting = [asyncio.create_task(link.command(b"ECHO", b"2")) for _ in range(3)]
        await asyncio.sleep(0.05)
        link.close()
        async with asyncio.timeout(120):
            answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(answer) for answer in answers} == {LinkBroken}


async def test_a_login_is_sent_and_its_refusal_does_not_show_the_password(
    opened: Open, single: EmbeddedStore
) -> None:
    with plain_client(single.index_url) as client:
        client.acl_setuser(
            "me", enabled=True, passwords=["+right"], keys=["*"], categories=["+@all"]
        )
        client.config_set("requirepass", "alone")
    path = single.index_url.removeprefix("unix://")
    assert await opened(f"unix://me:right@{path}?db=2").command(b"ACL", b"WHOAMI") == b"me"
    assert await opened(f"unix://:alone@{path}").command(b"ACL", b"WHOAMI") == b"default"
    with pytest.raises(ServerRefused, match="WRONGPASS") as caught:
        await opened(f"unix://me:wr0ng@{path}").command(b"ECHO", b"1")
    assert "wr0ng" not in str(caught.value)


async def test_an_invalid_reply_closes_the_connection_and_the_next_request_opens_a_new_one(
    opened: Open, answering: Serve
) -> None:
    link = opened(await answering(b"+OK\r\n", b"rubbish\r\n", b"+YES\r\n"))
    assert await link.request(pack(b"A")) == b"OK"
    with pytest.raises(ProtocolBroken):
        await link.request(pack(b"B"))
    assert await link.request(pack(b"C")) == b"YES"


async def test_a_server_that_hangs_up_on_each_request_gets_at_most_two_requests(
    opened: Open, answering: Serve
) -> None:
    link = opened(await answering(b"+OK\r\n", b"", b"", b"+LATE\r\n"))
    assert await link.request(pack(b"A")) == b"OK"
    with pytest.raises(LinkBroken, match="closed the connection"):
        await link.request(pack(b"B"))
