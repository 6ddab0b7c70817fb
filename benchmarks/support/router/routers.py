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
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from baton_engine.config.engine_config import SimConfig
from baton_node.settings import NodeSettings
from baton_router import RouterSettings
from benchmarks.support import role_processes
from benchmarks.support.rivals import ROUTERS, takes_part
from benchmarks.support.role_processes import answer_of, decode_node, model_of, process, tree
from benchmarks.support.router import mock_backend
from benchmarks.support.servers import HOST, free_port

HERE = Path(__file__).parent
BIN = ROUTERS
KV_BLOCKS = 20_000
# Every client's prompt in one step: nobody waits for another one's at the node.
STEP_TOKENS = 65_536
RUST = {
    "vllm-router": "vllm_router.launch_router",
    "sglang-router": "sglang_router.launch_router",
}
RIVALS = (*RUST, "envoy", "dynamo")


@dataclass(frozen=True)
class Side:
    """`counted` are the processes whose CPU time is its own; `node` is the URL of a Baton node."""

    name: str
    port: int
    model: str
    counted: tuple[psutil.Process, ...]
    node: str = ""

    def cpu_s(self) -> float:
        return role_processes.cpu_s(self.counted)


def sim_node(
    stack: ExitStack, name: str, delay_ms: float, model: Path, port: int = 0, sequences: int = 256
) -> tuple[str, psutil.Process]:
    """A ready node on the simulated engine, a token each `delay_ms`: its URL and its server. Port 0
    stands for a free one."""
    port = port or free_port()
    settings = NodeSettings(
        node=name,
        role="decode",
        port=port,
        engine="sim",
        model=str(model),
        kv_blocks=KV_BLOCKS,
        max_batched_tokens=STEP_TOKENS,
        max_num_seqs=sequences,
        sim=SimConfig(decode_ms=delay_ms),
    )
    server = stack.enter_context(decode_node(settings))
    url = f"http://{HOST}:{port}"
    answer_of(url + "/ready")
    return url, server


def baton(
    stack: ExitStack, delay_ms: float, model: Path, profile: str = "", index_url: str = ""
) -> Side:
    """`index_url`: for kept streams. The router is the first of the counted processes."""
    url, server = sim_node(stack, "decode", delay_ms, model)
    port = free_port()
    settings = RouterSettings(port=port, nodes=(url,), index_url=index_url)
    router = stack.enter_context(role_processes.router(settings, profile))
    answer_of(f"http://{HOST}:{port}/ready")
    return Side("baton", port, model_of(port), (router, server), node=url)


def mock(stack: ExitStack, delay_ms: float) -> Side:
    """The backend of others, asked directly."""
    port = free_port()
    words = (sys.executable, str(HERE / "mock_backend.py"), str(port), str(delay_ms))
    server = stack.enter_context(process(words, quiet=True))
    answer_of(f"http://{HOST}:{port}/health")
    return Side("mock, directly", port, mock_backend.MODEL, (server,))


def rivals(stack: ExitStack, names: Sequence[str], delay_ms: float, model: Path) -> list[Side]:
    """The named rivals and their backends. Dynamo's mocker has a speed instead of a delay, so it
    takes part only without a delay."""
    if not names:
        return []
    backend = mock(stack, delay_ms)
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
    router = stack.enter_context(process((*words, config, "--use-dynamic-base-id"), quiet=True))
    return _ready("envoy", port, backend.model, router)


def dynamo(stack: ExitStack, model: Path, folder: str) -> Side:
    port = free_port()
    common = {"DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
    planes = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
    python = str(BIN / "python")
    front = (python, "-m", "dynamo.frontend", "--http-host", HOST, "--http-port", str(port))
    mode = ("--router-mode", "kv", "--kv-cache-block-size", "16")
    router = stack.enter_context(process((*front, *planes, *mode), variables=common, quiet=True))
    size = ("--num-workers", "1", "--speedup-ratio", "1000", "--block-size", "16")
    mocker = (python, "-m", "dynamo.mocker", "--model-path", str(model))
    blocks = ("--num-gpu-blocks-override", str(KV_BLOCKS))
    stack.enter_context(process((*mocker, *planes, *size, *blocks), variables=common, quiet=True))
    return Side("dynamo", port, model_of(port), tree(router))


def installed() -> list[str]:
    """Which rivals are there."""
    there = [name for name in ("vllm-router", "envoy") if (BIN / name).exists()]
    modules = {"sglang-router": "sglang_router", "dynamo": "dynamo/mocker"}
    packages = BIN.parent / "lib"
    there += [
        name for name, module in modules.items() if any(packages.glob(f"*/site-packages/{module}"))
    ]
    return [name for name in RIVALS if name in there]


def taking_part(asked: Sequence[str] | None) -> list[str]:
    """The rivals to compare: those asked for, or all that are there. Raise SystemExit if one was
    asked for and is not there."""
    there = installed()
    return [
        name
        for name in (RIVALS if asked is None else asked)
        if takes_part(name, ROUTERS, there=name in there, asked=asked is not None)
    ]


def _rust(backend: Side, stack: ExitStack, name: str) -> Side:
    port, words = free_port(), (str(BIN / "python"), "-m", RUST[name])
    urls = ("--worker-urls", f"http://{HOST}:{backend.port}", "--policy", "cache_aware")
    where = ("--host", HOST, "--port", str(port), "--prometheus-port", str(free_port()))
    router = stack.enter_context(
        process((*words, *urls, *where, "--log-level", "error"), quiet=True)
    )
    return _ready(name, port, backend.model, router)


def _ready(name: str, port: int, model: str, router: psutil.Process) -> Side:
    answer_of(f"http://{HOST}:{port}/health")
    return Side(name, port, model, tree(router))


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
