"""RespConnection against a real server and against misbehaving sockets."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.embedded.servers import EmbeddedServers, EmbeddedStore, ServerSpec
from baton_kvstore.errors import (
    LinkBroken,
    LinkTimeout,
    ProtocolBroken,
    ServerRefused,
    StoreUnavailable,
    ValueTooLong,
)
from baton_kvstore.settings import check_reachable
from tests.support.stores.kvstore import PATIENCE_S, plain_client
from tests.support.wires.tls import make_certificate, tls_before
from tests.support.wires.wire import WireLoop

pytestmark = pytest.mark.integration

INFO_TEXT = b"# Server\r\nredis_version:6.2.0\r\nrun_id:" + b"a" * 40 + b"\r\n"
INFO = b"$%d\r\n%b\r\n" % (len(INFO_TEXT), INFO_TEXT)
Serve = Callable[..., str]


def deadline(seconds: float = PATIENCE_S) -> float:
    return time.monotonic() + seconds


def opened(url: str) -> RespConnection:
    connection = RespConnection(parse_endpoint(url))
    connection.open(deadline())
    return connection


@pytest.fixture
def server(single: EmbeddedStore) -> str:
    return single.data_urls[0]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Return a function that starts a server, which answers the first request with INFO and the
    next one, whatever it is, with the given bytes."""
    with ExitStack() as stack:

        def start(answer: bytes, greeting: bytes = INFO) -> str:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def work() -> None:
                peer, _ = listener.accept()
                with peer, suppress(OSError):  # the client may close first
                    for text in (greeting, answer):
                        peer.recv(1 << 16)
                        peer.sendall(text)
                    if not answer.endswith(b"<end>"):
                        peer.recv(1 << 16)  # until the client closes

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            stack.callback(thread.join, PATIENCE_S)
            return f"redis://127.0.0.1:{listener.getsockname()[1]}"

        yield start


def test_put_sends_a_value_from_a_buffer_and_get_receives_it_into_one(server: str) -> None:
    connection = opened(server)
    value = bytes(range(256)) * 20_000
    connection.put(deadline(), b"k", [memoryview(value)], 60_000)
    into = bytearray(len(value))
    assert connection.get(deadline(), b"k", [memoryview(into)], 60_000) == len(value)
    assert into == value
    with plain_client(server) as client:
        assert client.get("k") == value
    connection.close()


@pytest.mark.parametrize("size", [0, 1, 31, 32, 61, 62, 63, 64, 65, 16_384])
def test_small_values_of_every_size_arrive_complete(server: str, size: int) -> None:
    connection = opened(server)
    value = b"\r\n$"[:size].ljust(size, b"x")
    connection.put(deadline(), b"k", [memoryview(value)], 60_000)
    into = memoryview(bytearray(size))
    assert connection.get(deadline(), b"k", [into], 60_000) == size
    assert into == value
    assert connection.command(deadline(), b"PING") == b"PONG"
    connection.close()


@pytest.mark.parametrize("sizes", [(0, 5, 0, 1), (1,) * 3000, (96, 70_000, 70_000, 3)])
def test_a_value_may_be_in_several_pieces(server: str, sizes: tuple[int, ...]) -> None:
    """The case of 3,000 pieces has more than the kernel accepts in one call."""
    connection = opened(server)
    pieces = [memoryview(os.urandom(size)) for size in sizes]
    connection.put(deadline(), b"k", pieces, 60_000)
    into = [memoryview(bytearray(size)) for size in sizes]
    assert connection.get(deadline(), b"k", into, 60_000) == sum(sizes)
    assert into == pieces
    with plain_client(server) as client:
        assert client.get("k") == b"".join(pieces)
    connection.close()


def test_a_shorter_value_leaves_the_rest_of_the_pieces_unchanged(server: str) -> None:
    connection = opened(server)
    connection.put(deadline(), b"k", [memoryview(b"x" * 150)], 60_000)
    into = [memoryview(bytearray(100)) for _ in range(3)]
    assert connection.get(deadline(), b"k", into, 60_000) == 150
    assert b"".join(into) == b"x" * 150 + bytes(150)
    connection.close()


def test_get_of_a_missing_key_returns_none(server: str) -> None:
    connection = opened(server)
    assert connection.get(deadline(), b"nothing", [memoryview(bytearray(10))], 60_000) is None
    connection.close()


def test_replies_of_each_type_are_parsed(server: str) -> None:
    connection = opened(server)
    assert connection.command(deadline(), b"SET", b"n", b"1") == b"OK"
    assert connection.command(deadline(), b"INCR", b"n") == 2
    assert connection.command(deadline(), b"GET", b"n") == b"2"
    assert connection.command(deadline(), b"GET", b"none") is None
    connection.close()


def test_a_refusal_leaves_the_connection_open(server: str) -> None:
    connection = opened(server)
    with pytest.raises(ServerRefused, match="unknown command") as caught:
        connection.command(deadline(), b"NONSENSE")
    assert caught.value.code == "ERR"
    connection.command(deadline(), b"LPUSH", b"list", b"x")
    with pytest.raises(ServerRefused, match="WRONGTYPE"):
        connection.get(deadline(), b"list", [memoryview(bytearray(10))], 1000)
    assert connection.command(deadline(), b"PING") == b"PONG"
    connection.close()


def test_a_value_longer_than_expected_is_not_read(server: str) -> None:
    connection = opened(server)
    connection.put(deadline(), b"k", [memoryview(bytes(101))], 60_000)
    with pytest.raises(ValueTooLong, match="101 bytes, expected 100"):
        connection.get(deadline(), b"k", [memoryview(bytearray(100))], 60_000)
    assert not connection.is_open
    connection.close()


def test_an_unreachable_server_is_a_one_line_error(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/none.sock"
    with pytest.raises(LinkBroken, match=r"cannot reach Redis at unix://.*none.sock: No such file"):
        check_reachable(url)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkBroken, match=f"redis://127.0.0.1:{port}: Connection refused"):
        check_reachable(f"redis://127.0.0.1:{port}")


def test_a_server_that_never_answers_fails_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(LinkTimeout, match="did not answer in time"):
            check_reachable(url, timeout_s=0.2)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$abc\r\n",
        b"\r\n",
        b"$4\r\nabcdXY",
        b":1\r\n",
        b"+" + b"x" * 20_000,
    ],
)
def test_an_invalid_reply_closes_the_connection(serve: Serve, answer: bytes) -> None:
    connection = opened(serve(answer))
    with pytest.raises(ProtocolBroken):
        connection.get(deadline(), b"k", [memoryview(bytearray(100))], 1000)
    assert not connection.is_open


def test_data_after_a_reply_closes_the_connection(serve: Serve) -> None:
    connection = opened(serve(b"+OK\r\n+OK\r\n"))
    with pytest.raises(ProtocolBroken, match="sent data after its reply"):
        connection.command(deadline(), b"PING")
    assert not connection.is_open


def test_a_connection_that_closes_within_a_value_is_broken(serve: Serve) -> None:
    connection = opened(serve(b"$100\r\nhalf<end>"))
    with pytest.raises(LinkBroken, match="closed the connection"):
        connection.get(deadline(), b"k", [memoryview(bytearray(100))], 1000)
    assert connection.run_id == ""


def test_a_deadline_applies_to_the_whole_value_not_to_each_packet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def trickle() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(INFO)
                peer.recv(1 << 16)
                peer.sendall(b"$100000\r\n")
                for _ in range(600):
                    try:
                        peer.sendall(b"x")
                    except OSError:
                        return
                    time.sleep(0.05)

        thread = threading.Thread(target=trickle, daemon=True)
        thread.start()
        connection = opened(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(LinkTimeout):
            connection.get(deadline(0.5), b"k", [memoryview(bytearray(100_000))], 1000)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_server_without_a_run_id_is_refused(serve: Serve) -> None:
    with pytest.raises(ProtocolBroken, match="is it a Redis server"):
        check_reachable(serve(b"", b"$-1\r\n"))


def test_an_old_server_is_refused_by_its_version(serve: Serve) -> None:
    old = INFO.replace(b"6.2.0", b"6.0.9")
    with pytest.raises(ServerRefused, match=r"OLD Redis 6.0.9 .* 6.2 or newer"):
        check_reachable(serve(b"", old))


def test_abort_wakes_a_waiting_thread(serve: Serve) -> None:
    connection = opened(serve(b"$100\r\nhalf"))
    timer = threading.Timer(0.1, connection.abort)
    timer.start()
    with pytest.raises(LinkBroken):
        connection.get(deadline(), b"k", [memoryview(bytearray(100))], 1000)
    timer.join()


def test_an_operation_on_a_closed_connection_raises(server: str) -> None:
    connection = opened(server)
    connection.close()
    connection.abort()  # no effect
    with pytest.raises(LinkBroken, match="not connected"):
        connection.command(deadline(), b"PING")


MakeServers = Callable[..., EmbeddedServers]


def test_a_server_with_a_password_requires_it(
    make_servers: MakeServers, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    servers = make_servers(ServerSpec("open", 8 << 20, "noeviction"))
    place = servers.url("open").removeprefix("unix://")
    with plain_client(servers.url("open")) as admin:
        admin.acl_setuser(
            "me", enabled=True, passwords=["+s3cret"], keys=["*"], categories=["+@all"]
        )
        admin.config_set("requirepass", "s3cret")
    assert check_reachable(f"unix://me:s3cret@{place}").version
    assert check_reachable(f"unix://:s3cret@{place}?db=3").run_id
    with pytest.raises(ServerRefused, match="WRONGPASS") as caught:
        check_reachable(f"unix://me:wr0ng@{place}")
    with pytest.raises(ServerRefused, match="NOAUTH"):
        check_reachable(f"unix://{place}")
    with pytest.raises(ServerRefused, match="DB index is out of range"):
        check_reachable(f"unix://me:s3cret@{place}?db=99")
    assert "wr0ng" not in str(caught.value) + caplog.text
    assert "s3cret" not in caplog.text


def test_tls_transfers_values_and_verifies_the_certificate(server: str, tmp_path: Path) -> None:
    certificate, loop = make_certificate(tmp_path), WireLoop()
    try:
        with tls_before(loop, server, certificate) as place:
            with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                check_reachable(f"rediss://{place}")
            connection = opened(f"rediss://{place}?ssl_ca_certs={certificate}")
            value = bytes(range(256)) * 4000
            connection.put(deadline(), b"k", [memoryview(value)], 60_000)
            into = memoryview(bytearray(len(value)))
            assert connection.get(deadline(), b"k", [into], 60_000) == len(value)
            assert into == value
            connection.close()
    finally:
        loop.close()
