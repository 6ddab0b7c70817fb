"""Runs roles of a pool, and other measured programs, as processes for the duration of a block.

In: settings or a command line. Out: processes, whose CPU time a benchmark can read; and, from their
HTTP answers, whether they are ready and which model they serve.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec
import psutil

from baton_node.settings import NodeSettings
from baton_router import RouterSettings
from benchmarks.support.servers import HOST

START_S = 120.0
STOP_S = 15.0
NODE_MAIN = """
import sys, msgspec
from baton_node.settings import NodeSettings
from baton_decode_node.serve import serve
from baton_protocol.event_loop import run
settings = msgspec.json.decode(sys.stdin.buffer.read(), type=NodeSettings)
run(serve(settings, "baton_cli.engine_process"))
"""
ROUTER_MAIN = """
import sys, msgspec
from baton_protocol.event_loop import run
from baton_router import RouterSettings, serve
run(serve(msgspec.json.decode(sys.stdin.buffer.read(), type=RouterSettings)))
"""
PROFILED = """
import atexit, cProfile, pstats, sys
profile = cProfile.Profile()
profile.enable()
atexit.register(lambda: (profile.disable(), profile.dump_stats({path!r})))
"""


@contextmanager
def process(
    command: Sequence[str],
    settings: bytes = b"",
    variables: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
) -> Iterator[psutil.Process]:
    """Run a child until the block ends. `settings` is its stdin; `quiet` drops its output."""
    output = subprocess.DEVNULL if quiet else None
    child = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env={**os.environ, **(variables or {})},
    )
    try:
        assert child.stdin is not None
        child.stdin.write(settings)
        child.stdin.close()
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        try:
            child.wait(STOP_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def decode_node(settings: NodeSettings) -> AbstractContextManager[psutil.Process]:
    """Run a decode node's server, whose engine is a child process."""
    return process((sys.executable, "-c", NODE_MAIN), msgspec.json.encode(settings))


def router(settings: RouterSettings, profile: str = "") -> AbstractContextManager[psutil.Process]:
    """Run a router. `profile` is the file for its cProfile output, "" for none."""
    main = (PROFILED.format(path=profile) if profile else "") + ROUTER_MAIN
    return process((sys.executable, "-c", main), msgspec.json.encode(settings))


def tree(root: psutil.Process) -> tuple[psutil.Process, ...]:
    """The process and all its descendants."""
    return (root, *root.children(recursive=True))


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """The processes' user and system time so far, in seconds, over all threads. Linux has a clock
    for each process, as clock_getcpuclockid(3) says; psutil's times are whole hundredths."""
    return sum(time.clock_gettime(~process.pid << 3 | 2) for process in processes)


def answer_of(url: str, accept: Callable[[bytes], bool] = lambda body: True) -> bytes:
    """Poll `url` until an answer with status 200 is accepted; raise SystemExit after START_S."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                body: bytes = response.read()
                if accept(body):
                    return body
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"{url} is not ready after {START_S:g} s")


def model_of(port: int) -> str:
    """The name of the model served at a port of this machine."""
    body = answer_of(f"http://{HOST}:{port}/v1/models", lambda body: bool(json.loads(body)["data"]))
    return str(json.loads(body)["data"][0]["id"])
