"""The metrics port answers scrapes and closes silent connections."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from contextlib import suppress

import pytest

from baton_cli.commands.up import reserve_port
from baton_operator.metrics import Metrics

pytestmark = pytest.mark.integration

END_S = 120.0


def scrape(port: int) -> bytes:
    """Scrape the port, and retry if the machine is so slow that the server closes the connection
    as silent."""
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        with (
            suppress(ConnectionError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=END_S) as response,
        ):
            body: bytes = response.read()
            return body
    raise TimeoutError("no scrape was answered")


def test_half_a_request_is_closed_and_its_thread_ends(capfd: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    with reserve_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        close = Metrics().serve("127.0.0.1", port, silence_s=0.3)
        try:
            waiting = [socket.create_connection(("127.0.0.1", port), END_S) for _ in range(20)]
            for one in waiting:
                with suppress(ConnectionError):  # the server may have closed it already
                    one.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
            for one in waiting:
                with one, suppress(ConnectionError):
                    assert one.recv(1) == b""
            assert b"baton_operator_" in scrape(port)
        finally:
            close()
    for thread in set(threading.enumerate()) - before:
        thread.join(END_S)
        assert not thread.is_alive(), thread.name
    assert "Traceback" not in capfd.readouterr().err
