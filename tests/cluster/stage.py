"""A pool whose nodes are made up, for an operator that drains them.

The control plane is real, and so are the pods, made by its controllers; nothing runs in them. In:
what a test says of them, as kubelets, routers and nodes would: to the API server, by HTTP at an
address of the router's own, and in a real Redis. Out: what the operator made of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.error import HTTPError

from baton_kvstore.endpoint import with_login
from baton_kvstore.registry import LONGEST_TTL_S, Registry
from baton_operator.builders.router import PORT
from baton_protocol.store import NodeLoad, NodeState
from tests.cluster.operators import Body, Pool, Window, until
from tests.operator.test_operator_index import PASSWORD
from tests.support.nodes.fake_node import make_report

SECRET = "index-login"


class Told(NamedTuple):
    act: str
    node: str
    token: str
    words: Body


class Router:
    """Stands for all routers of a test: says yes, or `status`, and keeps what it was told."""

    def __init__(self) -> None:
        # Of this process, since workers beside it listen on the same port.
        number = os.getpid()
        self.address = f"127.{77 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
        self.status = 200
        self.told: list[Told] = []

    def acts(self, act: str) -> list[str]:
        """The nodes that were to do this, once for each time."""
        return [one.node for one in self.told if one.act == act]

    def hear(self, path: str, token: str, words: Body) -> tuple[int, Body]:
        _, _, node, act = path.split("/")
        self.told.append(Told(act, node, token, words))
        return self.status, {"node": node, "error": {"message": "as the test wants it"}}


@contextmanager
def standing_router() -> Iterator[Router]:
    router = Router()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            words = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            status, body = router.hear(self.path, self.headers["Authorization"], words)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer((router.address, PORT), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield router
        server.shutdown()
        thread.join()


class Stage:
    """One pool with `decode` decode nodes, all ready and without requests."""

    def __init__(self, pool: Pool, window: Window, index_url: str, router: Router) -> None:
        self.pool = pool
        self._window = window
        self.router = router
        self._index_url = index_url

    def spec(self, decode: int) -> Body:
        store = {
            "indexUrl": self._index_url,
            "dataUrls": ["redis://data.example"],
            "secretRef": {"name": SECRET},
        }
        return {
            "engine": {"kind": "sim"},
            "decode": {"replicas": decode},
            "kvStore": {"external": store},
        }

    def begin(self, decode: int) -> None:
        login = f"--from-literal=password={PASSWORD}"
        self.pool.kubectl("create", "secret", "generic", SECRET, login)
        self.pool.apply(self.spec(decode))
        until(lambda: len(self.nodes()) == decode, "the nodes' pods")
        until(lambda: self._pods("prefill") and self._pods("router"), "the other pods")
        until(lambda: "revision" in self.pool.body().get("status", {}), "the first status")
        for pod in self.nodes():
            self.kubelet(pod)
            self.report(pod)
        for pod in self._pods("prefill"):
            self.kubelet(pod)
        for pod in self._pods("router"):
            self.kubelet(pod, podIP=self.router.address)
        until(lambda: self.pool.condition("Ready").get("status") == "True", "condition Ready")

    def scale(self, decode: int) -> None:
        self.pool.patch({"decode": {"replicas": decode}})

    def nodes(self) -> list[str]:
        """Names of the decode nodes' pods, without those that end."""
        return sorted(name for name in self._pods("decode"))

    def replicas(self) -> int:
        found: int = self.pool.child("Deployment", "decode")["spec"]["replicas"]
        return found

    def scaled(self) -> str:
        """The reason of that condition."""
        reason: str = self.pool.condition("Scaled").get("reason", "")
        return reason

    def notes(self, pod: str) -> dict[str, str]:
        body = json.loads(self.pool.kubectl("get", "pod", pod, "-o", "json"))
        found: dict[str, str] = body["metadata"].get("annotations", {})
        return {name: text for name, text in found.items() if "drain" in name or "cost" in name}

    def events(self, reason: str) -> list[str]:
        listed = json.loads(self.pool.kubectl("get", "events.events.k8s.io", "-o", "json"))
        return [one["note"] for one in listed["items"] if one["reason"] == reason]

    def looks(self, act: str, count: int = 3) -> None:
        """The operator has looked so many times more, and told the router each time."""
        before = len(self.router.acts(act))
        until(lambda: len(self.router.acts(act)) >= before + count, f"{count} times {act}")

    def kubelet(self, pod: str, *, ready: bool = True, **status: Any) -> None:
        """What one would say of a pod."""
        now = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        conditions = [{"type": "Ready", "status": "True" if ready else "False", **now}]
        text = json.dumps({"status": {"phase": "Running", "conditions": conditions, **status}})
        words = ("--subresource=status", "--type=merge", f"--patch={text}")
        self.pool.kubectl("patch", "pod", pod, *words)

    def report(self, node: str, requests: int = 0, state: NodeState = "ready") -> None:
        """What the node says from now on."""
        revision = self.pool.body()["status"]["revision"]
        load = NodeLoad(requests=requests)
        report = make_report(node, "decode", revision=revision, load=load, state=state)

        async def register() -> None:
            url = with_login(self._index_url, "", PASSWORD)
            async with Registry(url, f"{self.pool.namespace}.{self.pool.name}") as registry:
                await registry.register(report, LONGEST_TTL_S)

        asyncio.run(register())

    def ready_nodes(self) -> int:
        words = ("-l", "baton.dev/component=decode", "-o", "json")
        listed = json.loads(self.pool.kubectl("get", "pods", *words))["items"]
        said = [one["status"].get("conditions") or () for one in listed]
        return sum(
            {"type": "Ready", "status": "True"}.items() <= c.items() for s in said for c in s
        )

    def evict(self, pod: str) -> int:
        """As `kubectl drain` does; the HTTP status of the answer. Whoever counts for the budget has
        counted all that was before."""
        until(self._is_counted, "the budget's count")
        path = f"/api/v1/namespaces/{self.pool.namespace}/pods/{pod}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.pool.namespace},
        }
        try:
            self._window.send("POST", path, body)
        except HTTPError as error:
            return error.code
        return 201

    def _is_counted(self) -> bool:
        budget = self.pool.child("PodDisruptionBudget", "decode")
        status = budget.get("status", {})
        seen = status.get("observedGeneration") == budget["metadata"]["generation"]
        counted = status.get("currentHealthy") == self.ready_nodes()
        return seen and counted and not status.get("disruptedPods")

    def _pods(self, component: str) -> list[str]:
        words = ("-l", f"baton.dev/component={component}", "-o", "json")
        listed = json.loads(self.pool.kubectl("get", "pods", *words))["items"]
        metadata = [one["metadata"] for one in listed]
        return [one["name"] for one in metadata if "deletionTimestamp" not in one]
