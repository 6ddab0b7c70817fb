"""`baton up` on the simulated engine: signals, restarts, and an end that leaves nothing."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import pytest

from baton_cli.commands.up import reserve_port
from tests.support.pools.baton_up import Pool
from tests.support.project.command import baton_process

pytestmark = pytest.mark.integration

SIM = ["--engine", "sim", "--chunk-blocks", "1", "--kv-blocks", "500"]
UP = ["up", *SIM, "--port", "0"]
SLOW = [*SIM, "--sim-decode-ms", "50"]
# 100 tokens at 50 ms: the stream runs for five seconds, so a signal arrives in mid-stream.
STREAM = {"prompt": "Hello", "max_tokens": 100, "stream": True, "ignore_eos": True}
ENDLESS = {**STREAM, "max_tokens": 4000}


@contextmanager
def stream(pool: Pool, body: dict[str, object]) -> Iterator[Iterator[bytes]]:
    request = urllib.request.Request(
        f"{pool.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as response:
        yield (line for line in response if line.strip())


@pytest.mark.parametrize(
    "number",
    # make test needs only SIGTERM: every other test in this file ends its pool with SIGINT.
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)],
)
def test_one_signal_ends_the_pool_and_leaves_nothing(number: signal.Signals) -> None:
    with Pool([*SIM, "--prefill", "1", "--decode", "1"]) as pool:
        pool.get("/health")
        assert (
            list(pool.temporary.iterdir()) != []
        )  # the store's sockets, which the end must remove
        pool.stop(number)


def test_sigint_ends_a_pool_that_started_with_sigint_ignored() -> None:
    """`setsid baton up </dev/null &` in a script: the shell starts it with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the pool inherits it
    try:
        pool = Pool(SIM)
        pool.start()
    finally:
        signal.signal(signal.SIGINT, before)
    with pool:
        pool.stop(signal.SIGINT)


def test_the_first_signal_lets_a_running_stream_finish() -> None:
    with Pool([*SLOW, "--drain-timeout", "240"]) as pool, stream(pool, STREAM) as lines:
        next(lines)
        pool.process.send_signal(signal.SIGINT)
        rest = list(lines)
        assert rest[-1].strip() == b"data: [DONE]"
        pool.check_over()
        assert pool.process.returncode == 0
        assert "stopping" in pool.log()


def test_the_second_signal_ends_everything_at_once() -> None:
    with Pool([*SLOW, "--drain-timeout", "600"]) as pool, stream(pool, ENDLESS) as lines:
        next(lines)
        pool.process.send_signal(signal.SIGINT)
        pool.wait(lambda: "stopping" in pool.log(), "begin to stop")
        pool.process.send_signal(signal.SIGINT)
        pool.check_over()


@pytest.mark.long  # test_supervisor.py kills a router that drains for too long
def test_a_stream_that_outlives_the_drain_timeout_is_ended() -> None:
    with Pool([*SLOW, "--drain-timeout", "0.2"]) as pool, stream(pool, ENDLESS) as lines:
        next(lines)
        pool.process.send_signal(signal.SIGTERM)
        pool.check_over()
        assert pool.process.returncode == 0


def test_a_frozen_node_is_killed_with_its_engine_when_the_pool_ends() -> None:
    with Pool(SIM) as pool:
        [node] = [node for node in pool.pool()["nodes"] if node["role"] == "decode"]
        psutil.Process(node["pid"]).suspend()
        pool.stop(signal.SIGINT)  # checks that no process is left


def test_after_a_killed_supervisor_no_process_and_no_file_is_left() -> None:
    with Pool(SIM) as pool:
        pool.process.kill()
        pool.process.wait(120)
        pool.wait(lambda: pool.processes() == [], "end with its supervisor")
        pool.wait(lambda: not list(pool.temporary.iterdir()), "remove its files")


@pytest.fixture(scope="module")
def lasting() -> Iterator[Pool]:
    """A pool for tests that leave it as they found it."""
    with Pool(SIM) as pool:
        yield pool


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_killed_node_ends_its_engine_and_is_restarted_under_another_pid(
    lasting: Pool, victim: str
) -> None:
    [node] = [node for node in lasting.pool()["nodes"] if node["id"] == victim]
    server = psutil.Process(node["pid"])
    engines = server.children(recursive=True)
    assert engines
    server.kill()
    _, alive = psutil.wait_procs(engines, timeout=120)
    assert alive == []

    def back() -> bool:
        seen = {node["id"]: node for node in lasting.pool()["nodes"]}.get(victim)
        return seen is not None and seen["state"] == "ready" and seen["pid"] != node["pid"]

    lasting.wait(back, f"bring {victim} back")
    assert f"{victim} was ended by SIGKILL; restarting it in 0.5 s" in lasting.log()


def test_once_prints_answer_placement_and_timings_and_exits() -> None:
    done = baton_process(*UP, "--once", "Hello")
    assert done.returncode == 0, done.stderr
    *answer, empty, placement, timings = done.stdout.splitlines()
    assert answer != [""]
    assert empty == ""
    assert placement.startswith("placement  prefill=")
    assert timings.startswith("timings    ready ")


@pytest.mark.long
def test_once_without_an_answer_prints_the_reason_and_exits_with_code_1() -> None:
    done = baton_process(*UP, "--max-model-len", "8", "--once", "longer than the model may read")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("baton: no answer: ")


def test_ready_all_is_true_only_when_every_node_is_ready() -> None:
    with reserve_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        pool = Pool([*SIM, "--prefill", "1", "--decode", "2", "--port", str(port)])
        pool.start()
        pool.url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            with suppress(OSError):  # no listener yet, or a 503
                return json.loads(pool.get("/ready?all=1"))["ready"] is True
            return False

        pool.wait(ready, "have all nodes")
        states = {node["id"]: node["state"] for node in pool.pool()["nodes"]}
        assert states == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "ready")
        with pool:  # stops it
            assert pool.running


def test_a_pool_whose_node_is_not_ready_in_time_exits_and_names_the_node() -> None:
    done = baton_process(*UP, "--ready-timeout", "0.1", "--once", "Hello")
    assert done.returncode == 1
    assert "not ready after 0.1 s (--ready-timeout): prefill-0 (" in done.stderr
