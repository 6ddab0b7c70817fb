"""Specs that the API server accepts and that cannot work are explained within 30 s.

The operator's status names the field, or the address, and the cause. `crd_cases` has the specs that
the API server refuses; what only a kubelet sees is in `test_node_problems`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from baton_cli.commands.up import reserve_port
from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import SIM, ApiClient, Operator, Pool, until
from tests.operator.index_servers import redis_server

EXPLAINED_S = 30.0  # the promise; what is explained takes 1 to 3 s
TORCH = {"engine": {"kind": "torch"}, "model": {"path": "/models/m"}}
GPU = "nvidia.com/gpu"


class Servers(NamedTuple):
    """URLs of servers: a Redis with a password, a closed port, a web server."""

    redis: str
    closed: str
    web: str


Make = Callable[[Servers], dict[str, Any]]


class Wrong(NamedTuple):
    """A spec, and the condition that explains it, with words of its message."""

    title: str
    spec: Make
    kind: str
    words: tuple[str, ...]


def constant(**spec: Any) -> Make:
    return lambda servers: {**SIM, **spec}


def external(
    index: Callable[[Servers], str], data: Callable[[Servers], str], login: str = "redis-login"
) -> Make:
    def spec(servers: Servers) -> dict[str, Any]:
        urls = {"indexUrl": index(servers), "dataUrls": [data(servers)]}
        return {**SIM, "kvStore": {"external": urls | {"secretRef": {"name": login}}}}

    return spec


def no_login(servers: Servers) -> dict[str, Any]:
    urls = {"indexUrl": servers.redis, "dataUrls": [servers.closed]}
    return {**SIM, "kvStore": {"external": urls}}


def template(part: str, **override: Any) -> Make:
    return constant(**{part: {"podTemplate": override}})


def autoscaled(**more: Any) -> Make:
    bounds = {"prefill": {"min": 1, "max": 2}, "decode": {"min": 1, "max": 4}}
    return lambda servers: {**SIM, "autoscaling": {"mode": "advise", **bounds, **more}}


def fixed(url: str) -> Callable[[Servers], str]:
    return lambda servers: url


REDIS, CLOSED, WEB = (lambda s: s.redis), (lambda s: s.closed), (lambda s: s.web)
UNKNOWN, METADATA = fixed("redis://no-such-host.invalid"), fixed("redis://169.254.169.254:6379")

WRONG = (
    Wrong("an index at a closed port", external(CLOSED, REDIS), "StoreReady",
          ("index server redis://127.0.0.1:", "refuses the connection")),
    Wrong("an index with an unknown name", external(UNKNOWN, REDIS), "StoreReady",
          ("index server redis://no-such-host.invalid:6379", "host name is unknown")),
    Wrong("an index that is a web server", external(WEB, REDIS), "StoreReady",
          ("index server redis://127.0.0.1:", "does not answer as a Redis server")),
    Wrong("an index that wants a login", no_login, "StoreReady",
          ("index server redis://127.0.0.1:", "secretRef")),
    Wrong("an index that refuses the password", external(REDIS, CLOSED, "wrong-login"),
          "StoreReady", ("index server redis://127.0.0.1:", "refuses the login")),
    Wrong("an index at the metadata service", external(METADATA, REDIS), "StoreReady",
          ("index server redis://169.254.169.254:6379", "may not connect")),
    Wrong("a data server at a closed port", external(REDIS, CLOSED), "StoreReady",
          ("data server redis://127.0.0.1:", "refuses the connection")),
    Wrong("a data server with an unknown name", external(REDIS, UNKNOWN), "StoreReady",
          ("data server redis://no-such-host.invalid:6379", "host name is unknown")),
    Wrong("a data server that is a web server", external(REDIS, WEB), "StoreReady",
          ("data server redis://127.0.0.1:", "does not answer as a Redis server")),
    Wrong("a data server at the metadata service", external(REDIS, METADATA), "StoreReady",
          ("data server redis://169.254.169.254:6379", "may not connect")),
    Wrong("a misnamed container",
          template("decode", spec={"containers": [{"name": "nodes", "env": []}]}), "Valid",
          ("spec.decode.podTemplate.spec.containers: 'nodes'", "write node")),
    Wrong("a misnamed container of routers",
          template("router", spec={"containers": [{"name": "node"}]}), "Valid",
          ("spec.router.podTemplate.spec.containers: 'node'", "write router")),
    Wrong("a label of ours", template("prefill", metadata={"labels": {"baton.dev/pool": "x"}}),
          "Valid", ("spec.prefill.podTemplate.metadata.labels", "baton.dev/")),
    Wrong("a field that pods do not have",
          template("decode", spec={"containers": [{"name": "node", "ports": "all"}]}), "Applied",
          ("Deployment", "ports")),
    Wrong("a ratio between two fractions", autoscaled(ratio={"min": "0.4", "max": "0.45"}), "Valid",
          ("ratio.min 0.4 to ratio.max 0.45", "prefill 1 to 2, decode 1 to 4")),
    Wrong("a budget below the minimums",
          lambda servers: autoscaled()(servers)
          | {"gpuBudget": 1}
          | {role: {"resources": {"limits": {GPU: 1}}} for role in ("prefill", "decode")},
          "Valid", ("gpuBudget 1", "2 GPUs of the minimums")),
    Wrong("a time zone that does not exist",
          autoscaled(schedules=[{"from": "08:00", "to": "09:00", "timeZone": "Mars/Olympus"}]),
          "Valid", ("spec.autoscaling.schedules[0].timeZone", "Mars/Olympus")),
    Wrong("two GPUs for a node", constant(**TORCH, decode={"resources": {"limits": {GPU: 2}}}),
          "SpecEffective", ("spec.decode.resources.limits", "2 GPUs and uses 1")),
    Wrong("a GPU for a simulated node", constant(prefill={"resources": {"limits": {GPU: 1}}}),
          "SpecEffective", ("spec.prefill.resources.limits", "uses 0")),
    Wrong("a route without a Gateway API",
          constant(router={"httpRoute": {"parentRefs": [{"name": "gate"}]}}), "Applied",
          ("HTTPRoute", "install its CustomResourceDefinition")),
)  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with (
        redis_server(tmp_path_factory.mktemp("redis")) as port,
        reserve_port("127.0.0.1", 0) as held,
        socket.create_server(("127.0.0.1", 0)) as web,
    ):
        threading.Thread(target=answer_as_web_server, args=(web,), daemon=True).start()
        closed, listens = held.getsockname()[1], web.getsockname()[1]
        yield Servers(
            f"redis://127.0.0.1:{port}",
            f"redis://127.0.0.1:{closed}",
            f"redis://127.0.0.1:{listens}",
        )


def answer_as_web_server(web: socket.socket) -> None:
    while True:
        try:
            connection, _ = web.accept()
        except OSError:
            return  # the test has ended
        with connection:
            connection.recv(1 << 10)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture(scope="module")
def where(plane: Kubernetes) -> Iterator[str]:
    """A namespace with the login of the external stores."""
    namespace = plane.new_namespace()
    password = "--from-literal=password=pass:word@with/signs%"
    plane.kubectl("create", "secret", "generic", "redis-login", password, "-n", namespace)
    wrong = "--from-literal=password=wrong"
    plane.kubectl("create", "secret", "generic", "wrong-login", wrong, "-n", namespace)
    yield namespace
    plane.delete_namespace(namespace)


@pytest.mark.parametrize("wrong", WRONG, ids=[wrong.title for wrong in WRONG])
def test_a_spec_that_cannot_work_is_explained_within_30_seconds(
    operator: Operator,
    plane: Kubernetes,
    api_client: ApiClient,
    servers: Servers,
    where: str,
    wrong: Wrong,
) -> None:
    pool = Pool(plane, api_client, where, wrong.title.lower().replace(" ", "-")[:40].strip("-"))
    pool.apply(wrong.spec(servers))
    found: dict[str, Any] = {}

    def explained() -> bool:
        found.update(pool.condition(wrong.kind))
        message = found.get("message", "")
        return found.get("status") != "True" and all(word in message for word in wrong.words)

    try:
        until(explained, f"{wrong.kind}: {wrong.words}", EXPLAINED_S)
        assert "pass:word" not in str(pool.body())
    finally:
        print(found)
        pool.delete()


def says(pool: Pool, kind: str, words: str) -> bool:
    return words in pool.condition(kind).get("message", "")


def test_two_pools_with_one_ingress_host_both_say_so(
    operator: Operator, plane: Kubernetes, api_client: ApiClient, where: str
) -> None:
    pools = [Pool(plane, api_client, where, name) for name in ("red", "blue")]
    for pool in pools:
        pool.apply({**SIM, "router": {"ingress": {"host": "llm.example"}}})
    for pool, other in zip(pools, reversed(pools), strict=True):
        words = f"spec.router.ingress.host: pool {where}/{other.name} routes llm.example too"
        until(partial(says, pool, "SpecEffective", words), words, EXPLAINED_S)
    pools[0].delete()
    until(
        lambda: pools[1].condition("SpecEffective")["status"] == "True",
        "the end of the clash",
        3 * EXPLAINED_S,
    )
    pools[1].delete()
