"""The routers that are compared, each with a server behind it that costs them nothing.

    baton         our router and a node on the simulated engine
    vllm-router, sglang-router, envoy   in front of mock_backend.py
    dynamo        its frontend and its mocker

In: a delay per token. Out: sides with a port and the processes whose CPU time counts: ours are the
router and the node's server (which detokenizes), the others' the router alone. What is not
installed is left out; `make peers-routers` installs it.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import psutil

from baton_node.settings import NodeSettings, SimOptions
from baton_router import RouterSettings
from benchmarks.support import mock_backend
from benchmarks.support.servers import free_port

HERE = Path(__file__).parent
BIN = HERE.parents[1] / ".venv-peers-routers" / "bin"
HOST = "127.0.0.1"
START_S = 60.0
STOP_S = 15.0
KV_BLOCKS = 20_000
RUST = {
    "vllm-router": "vllm_router.launch_router",
    "sglang-router": "sglang_router.launch_router",
}
RIVALS = (*RUST, "envoy", "dynamo")
NODE_MAIN = """
import asyncio, sys
from baton_node.settings import NodeSettings
from baton_decode_node import serve
asyncio.run(serve(NodeSettings.from_json(sys.stdin.buffer.read())))
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


@dataclass(frozen=True)
class Side:
    """`counted` are the processes whose CPU time is its own; `node` is the URL of a Baton node."""

    name: str
    port: int
    model: str
    counted: tuple[psutil.Process, ...]
    node: str = ""

    def cpu_s(self) -> float:
        """User and system time so far, of all threads."""
        times = [process.cpu_times() for process in self.counted]
        return float(sum(one.user + one.system for one in times))


@contextmanager
def process(
    words: Sequence[str], settings: bytes = b"", variables: Mapping[str, str] | None = None
) -> Iterator[psutil.Process]:
    """A child that ends with the block; `settings` is its stdin."""
    child = subprocess.Popen(
        list(words),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
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


def baton(stack: ExitStack, delay_ms: float, model: Path, profile: str = "") -> Side:
    node_port, port = free_port(), free_port()
    url = f"http://{HOST}:{node_port}"
    node = NodeSettings(
        node="decode",
        role="decode",
        port=node_port,
        engine="sim",
        model=str(model),
        kv_blocks=KV_BLOCKS,
        sim=SimOptions(decode_ms=delay_ms),
    )
    server = stack.enter_context(process((sys.executable, "-c", NODE_MAIN), node.to_json()))
    answer_of(url + "/ready")
    main = (PROFILED.format(path=profile) if profile else "") + ROUTER_MAIN
    settings = msgspec.json.encode(RouterSettings(port=port, nodes=(url,)))
    router = stack.enter_context(process((sys.executable, "-c", main), settings))
    answer_of(f"http://{HOST}:{port}/ready")
    return Side("baton", port, _model(port), (router, server), node=url)


def mock(stack: ExitStack, delay_ms: float, model: Path) -> Side:
    """The backend of others, asked directly."""
    port = free_port()
    words = (sys.executable, str(HERE / "mock_backend.py"), str(port), str(delay_ms))
    server = stack.enter_context(process(words))
    answer_of(f"http://{HOST}:{port}/health")
    return Side("mock, directly", port, mock_backend.MODEL, (server,))


def rivals(stack: ExitStack, names: Sequence[str], delay_ms: float, model: Path) -> list[Side]:
    """Those named, and what they have behind them; Dynamo's mocker is told a speed, not a delay, so
    it is there only where there is none."""
    if not names:
        return []
    backend = mock(stack, delay_ms, model)
    found = [backend]
    found += [_rust(backend, stack, name) for name in names if name in RUST]
    if "envoy" in names:
        found.append(envoy(backend, stack))
    if "dynamo" in names and not delay_ms:
        place = stack.enter_context(TemporaryDirectory(prefix="baton-bench-"))
        found.append(dynamo(stack, model, place))
    return found


def envoy(backend: Side, stack: ExitStack) -> Side:
    port = free_port()
    words = (str(BIN / "envoy"), "--concurrency", "1", "--log-level", "error", "--config-yaml")
    config = json.dumps(_envoy_config(port, backend.port))
    router = stack.enter_context(process((*words, config, "--use-dynamic-base-id")))
    return _ready("envoy", port, backend.model, router)


def dynamo(stack: ExitStack, model: Path, folder: str) -> Side:
    port = free_port()
    common = {"DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
    planes = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
    python = str(BIN / "python")
    front = (python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port))
    mode = ("--router-mode", "kv", "--kv-cache-block-size", "16")
    router = stack.enter_context(process((*front, *planes, *mode), variables=common))
    size = ("--num-workers", "1", "--speedup-ratio", "1000", "--block-size", "16")
    mocker = (python, "-m", "dynamo.mocker", "--model-path", str(model))
    blocks = ("--num-gpu-blocks-override", str(KV_BLOCKS))
    stack.enter_context(process((*mocker, *planes, *size, *blocks), variables=common))
    return Side("dynamo", port, _model(port), _tree(router))


def installed() -> list[str]:
    """Which rivals are there."""
    there = [name for name in ("vllm-router", "envoy") if (BIN / name).exists()]
    modules = {"sglang-router": "sglang_router", "dynamo": "dynamo/mocker"}
    packages = BIN.parent / "lib"
    there += [
        name for name, module in modules.items() if any(packages.glob(f"*/site-packages/{module}"))
    ]
    return [name for name in RIVALS if name in there]


def _rust(backend: Side, stack: ExitStack, name: str) -> Side:
    port, words = free_port(), (str(BIN / "python"), "-m", RUST[name])
    urls = ("--worker-urls", f"http://{HOST}:{backend.port}", "--policy", "cache_aware")
    where = ("--host", HOST, "--port", str(port), "--prometheus-port", str(free_port()))
    router = stack.enter_context(process((*words, *urls, *where, "--log-level", "error")))
    return _ready(name, port, backend.model, router)


def _ready(name: str, port: int, model: str, router: psutil.Process) -> Side:
    answer_of(f"http://{HOST}:{port}/health")
    return Side(name, port, model, _tree(router))


def _tree(root: psutil.Process) -> tuple[psutil.Process, ...]:
    return (root, *root.children(recursive=True))


def _model(port: int) -> str:
    body = answer_of(f"http://{HOST}:{port}/v1/models", lambda body: bool(json.loads(body)["data"]))
    return str(json.loads(body)["data"][0]["id"])


def _envoy_config(port: int, backend: int) -> dict[str, object]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": HOST, "port_value": number}}

    kinds = "type.googleapis.com/envoy.extensions.filters"
    route = {"match": {"prefix": "/"}, "route": {"cluster": "backend", "timeout": "0s"}}
    router = {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{kinds}.http.router.v3.Router"},
    }
    manager = {
        "@type": f"{kinds}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": [router],
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    }
    chain = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    endpoint = {"endpoint": {"address": address(backend)}}
    cluster = {
        "name": "backend",
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {
            "cluster_name": "backend",
            "endpoints": [{"lb_endpoints": [endpoint]}],
        },
    }
    listener = {"address": address(port), "filter_chains": [{"filters": [chain]}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
