"""The processes that benchmarks start, and the clients that send them requests."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.support.role_processes import answer_of, cpu_s, model_of, process, tree
from benchmarks.support.router import mock_backend
from benchmarks.support.router.load_generator import Question, closed_loop, http_clients
from benchmarks.support.servers import HOST, free_port

pytestmark = pytest.mark.integration

# It writes its stdin to a file, starts a child, and computes until it is killed.
ECHO = """
import subprocess, sys
open(sys.argv[1], "wb").write(sys.stdin.buffer.read())
subprocess.Popen(["sleep", "600"])
while True: pass
"""


def test_a_process_reads_its_settings_and_ends_with_the_context(tmp_path: Path) -> None:
    received, code = tmp_path / "received", tmp_path / "code"
    code.write_text(ECHO)
    with process((sys.executable, str(code), str(received)), b"settings") as child:
        while len(both := tree(child)) < 2:
            assert child.status() != psutil.STATUS_ZOMBIE
        assert received.read_bytes() == b"settings"
        while not (alone := cpu_s(both[:1])):  # the kernel counts in steps of up to 10 ms
            assert child.status() != psutil.STATUS_ZOMBIE
        assert cpu_s(both) >= alone
    assert not child.is_running()
    both[1].kill()


async def test_clients_send_each_request_once() -> None:
    port = free_port()
    with process((sys.executable, mock_backend.__file__, str(port), "2"), quiet=True):
        answer_of(f"http://{HOST}:{port}/health")
        questions = [Question("so", (1, 2), tokens) for tokens in (1, 20, 3, 4, 5)]
        async with http_clients(port, model_of(port), 2) as senders:
            timings = await closed_loop(senders, questions)
    assert len(timings) == 5
    assert all(2 <= one.first_ms <= one.last_ms for one in timings)
    assert max(one.last_ms for one in timings) >= 40
