"""The operator's metrics port answers scrapes, and closes connections that ask for nothing."""

from __future__ import annotations

import socket
import threading
import urllib.request

import pytest

from baton_operator.metrics import Metrics

END_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_half_a_request_is_closed_and_its_thread_ends(capfd: pytest.CaptureFixture[str]) -> None:
    port, before = free_port(), threading.active_count()
    close = Metrics().serve("127.0.0.1", port, silence_s=0.3)
    try:
        waiting = [socket.create_connection(("127.0.0.1", port), END_S) for _ in range(20)]
        for one in waiting:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost:")
        for one in waiting:
            assert one.recv(1) == b""
            one.close()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=END_S) as answer:
            assert b"baton_operator_" in answer.read()
    finally:
        close()
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join(END_S)
    assert threading.active_count() == before
    assert "Traceback" not in capfd.readouterr().err
