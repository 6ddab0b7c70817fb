"""Roles of a pool, and whatever else is measured, as processes that end with a block.

In: settings or a command line. Out: processes, for whoever counts their CPU time; and, from their
own HTTP answers, that they serve and which model.
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
import asyncio, sys
from baton_node.settings import NodeSettings
from baton_decode_node.serve import serve
settings = NodeSettings.from_json(sys.stdin.buffer.read())
asyncio.run(serve(settings, "baton_cli.engine_process"))
"""
ROUTER_MAIN = """
import asyncio, sys, msgspec
from baton_router import RouterSettings, serve
asyncio.run(serve(msgspec.json.decode(sys.stdin.buffer.read(), type=RouterSettings)))
"""
PROFILED = """
import atexit, cProfile, pstats, sys
profile = cProfile.Profile()
profile.enable()
atexit.register(lambda: (profile.disable(), profile.dump_stats({path!r})))
"""


@contextmanager
def process(
    words: Sequence[str],
    settings: bytes = b"",
    variables: Mapping[str, str] | None = None,
    *,
    quiet: bool = False,
) -> Iterator[psutil.Process]:
    """A child that ends with the block; `settings` is its stdin. What a quiet one says is lost."""
    output = subprocess.DEVNULL if quiet else None
    child = subprocess.Popen(
        list(words),
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
    """A node's server; its engine is a process below it."""
    return process((sys.executable, "-c", NODE_MAIN), settings.to_json())


def router(settings: RouterSettings, profile: str = "") -> AbstractContextManager[psutil.Process]:
    """`profile`: the file that its cProfile goes to when it ends, "" for none."""
    main = (PROFILED.format(path=profile) if profile else "") + ROUTER_MAIN
    return process((sys.executable, "-c", main), msgspec.json.encode(settings))


def tree(root: psutil.Process) -> tuple[psutil.Process, ...]:
    """It and all below it."""
    return (root, *root.children(recursive=True))


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """User and system time so far, of all threads."""
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


def answer_of(url: str, accept: Callable[[bytes], bool] = lambda body: True) -> bytes:
    """The first answer of 200 that is accepted; SystemExit if none comes."""
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
    """What is served there."""
    body = answer_of(f"http://{HOST}:{port}/v1/models", lambda body: bool(json.loads(body)["data"]))
    return str(json.loads(body)["data"][0]["id"])
