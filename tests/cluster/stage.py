"""A pool whose nodes are made up, for an operator that drains them and rolls them out.

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

import psutil

from baton_kvstore.connection.endpoint import with_login
from baton_kvstore.index.registry import LONGEST_TTL_S, Registry
from baton_operator.names import ROUTER_PORT
from baton_protocol.ids import Fingerprint
from baton_protocol.store import NodeLoad, NodeState, Role
from tests.cluster.operators import Body, Pool, until
from tests.operator.state.test_index_reader import PASSWORD
from tests.support.nodes.fake_node import make_report

SECRET = "index-login"
ROLES: tuple[Role, ...] = ("prefill", "decode")
SAME, OTHER = Fingerprint("5" * 32), Fingerprint("0" * 32)


class RouterCall(NamedTuple):
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
        self.told: list[RouterCall] = []

    def acts(self, act: str) -> list[str]:
        """The nodes that were to do this, once for each time."""
        return [one.node for one in self.told if one.act == act]

    def hear(self, path: str, token: str, words: Body) -> tuple[int, Body]:
        _, _, node, act = path.split("/")
        self.told.append(RouterCall(act, node, token, words))
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

    with ThreadingHTTPServer((router.address, ROUTER_PORT), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield router
        server.shutdown()
        thread.join()


class Stage:
    """One pool, of which a test says what its pods and nodes are."""

    def __init__(self, pool: Pool, index_url: str, router: Router) -> None:
        self.pool = pool
        self.router = router
        self._index_url = index_url

    def begin(self, decode: int = 1, /, **spec: Any) -> str:
        """One prefill node and so many decode nodes, all ready and without requests; returns the
        revision. Each field of `spec` is laid over the pool's own one."""
        login = f"--from-literal=password={PASSWORD}"
        self.pool.kubectl("create", "secret", "generic", SECRET, login)
        self.pool.apply(self._spec(decode, spec))
        until(lambda: len(self.nodes()) == decode, "the decode nodes' pods")
        until(lambda: self.pods("prefill") and self.pods("router"), "the other pods")
        until(lambda: "revision" in self.pool.body().get("status", {}), "the first status")
        revision = self.revision()
        self.serve(revision)
        for pod in self.pods("router"):
            self.kubelet(pod, podIP=self.router.address)
        until(lambda: self.pool.condition("Ready").get("status") == "True", "condition Ready")
        return revision

    def _spec(self, decode: int, more: Body) -> Body:
        store = {
            "indexUrl": self._index_url,
            "dataUrls": ["redis://data.example"],
            "secretRef": {"name": SECRET},
        }
        own: Body = {
            "engine": {"kind": "sim"},
            "decode": {"replicas": decode},
            "kvStore": {"external": store},
        }
        for name, value in more.items():
            own[name] = own.get(name, {}) | value if isinstance(value, dict) else value
        return own

    # --- what a user does -------------------------------------------------------------------------

    def scale(self, decode: int) -> None:
        self.pool.patch({"decode": {"replicas": decode}})

    def roll(self, **spec: Any) -> str:
        """Edit the spec such that other pods are wanted; returns the new revision, once it is
        made."""
        old = self.revision()
        self.pool.patch(spec or {"engine": {"blockSize": 32}})
        until(lambda: self.revision() != old, "another revision")
        new = self.revision()
        until(lambda: len(self.deployments(new)) == 2, "its Deployments")
        return new

    def evict(self, pod: str) -> int:
        """As `kubectl drain` does; the HTTP status of the answer. Whoever counts for the budget has
        counted all that was before."""
        until(self._is_counted, "the budget's count")
        return self.pool.evict(pod)

    # --- what kubelets and nodes say --------------------------------------------------------------

    def kubelet(self, pod: str, *, ready: bool = True, **status: Any) -> None:
        """What one would say of a pod."""
        now = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        conditions = [{"type": "Ready", "status": "True" if ready else "False", **now}]
        self.pool.patch_pod_status(pod, {"phase": "Running", "conditions": conditions, **status})

    def report(
        self,
        node: str,
        requests: int = 0,
        state: NodeState = "ready",
        fingerprint: Fingerprint = SAME,
    ) -> None:
        """What the node says from now on, of whatever role and revision it is."""
        labels = self.pool.pod(node)["metadata"]["labels"]
        report = make_report(
            node,
            labels["baton.dev/component"],
            revision=labels["baton.dev/revision"],
            fingerprint=fingerprint,
            load=NodeLoad(requests=requests),
            state=state,
        )

        async def register() -> None:
            url = with_login(self._index_url, "", PASSWORD)
            async with Registry(url, f"{self.pool.namespace}.{self.pool.name}") as registry:
                await registry.register(report, LONGEST_TTL_S)

        asyncio.run(register())

    def serve(self, revision: str, *roles: Role, fingerprint: Fingerprint = SAME) -> None:
        """All pods that there are of these roles get ready, and their nodes report."""
        for pod in self.of(revision, *roles):
            self.report(pod, fingerprint=fingerprint)
            self.kubelet(pod)

    def drained(self, *nodes: str) -> None:
        """Wait until these are told to drain, and let them have done so."""
        until(lambda: all(self.words(node) for node in nodes), "the drains")
        for node in nodes:
            self.report(node, state="draining")

    # --- what the operator made of it -------------------------------------------------------------

    def nodes(self) -> list[str]:
        """Names of the decode nodes' pods, without those that end."""
        return self.pods("decode")

    def pods(self, component: str) -> list[str]:
        """Names, without those that end."""
        return names(self.pool.pods(component=component))

    def of(self, revision: str, *roles: Role) -> list[str]:
        """Names of these nodes' pods, without those that end."""
        pods = self.pool.pods(revision=revision)
        wanted = roles or ROLES
        return names(
            [one for one in pods if one["metadata"]["labels"]["baton.dev/component"] in wanted]
        )

    def made(self, revision: str, role: Role, count: int = 1) -> list[str]:
        """Its pods, when there are as many."""
        until(lambda: len(self.of(revision, role)) == count, f"{count} {role} pods of {revision}")
        return self.of(revision, role)

    def revision(self) -> str:
        found: str = self.pool.body()["status"]["revision"]
        return found

    def deployments(self, revision: str) -> dict[str, int]:
        """Replicas by role."""
        return {
            one["metadata"]["labels"]["baton.dev/component"]: one["spec"]["replicas"]
            for one in self.pool.of_kind("Deployment")
            if one["metadata"]["labels"].get("baton.dev/revision") == revision
        }

    def replicas(self) -> int:
        found: int = self.pool.child("Deployment", "decode")["spec"]["replicas"]
        return found

    def scaled(self) -> str:
        """The reason of that condition."""
        reason: str = self.pool.condition("Scaled").get("reason", "")
        return reason

    def blocked(self) -> tuple[str, str]:
        found = self.pool.condition("RolloutBlocked")
        return found.get("status", ""), found.get("reason", "")

    def is_over(self, old: str) -> bool:
        return not self.deployments(old) and self.blocked() == ("False", "NotRolling")

    def notes(self, pod: str) -> dict[str, str]:
        found: dict[str, str] = self.pool.pod(pod)["metadata"].get("annotations", {})
        return {name: text for name, text in found.items() if "drain" in name or "cost" in name}

    def words(self, node: str) -> Body:
        """With which it was told last to drain."""
        found = [one.words for one in self.router.told if (one.act, one.node) == ("drain", node)]
        return found[-1] if found else {}

    def looks(self, act: str, count: int = 3) -> None:
        """The operator has looked so many times more, and told the router each time."""
        before = len(self.router.acts(act))
        until(lambda: len(self.router.acts(act)) >= before + count, f"{count} times {act}")

    def _ready_nodes(self) -> int:
        said = [one["status"].get("conditions") or () for one in self.pool.pods(component="decode")]
        return sum(
            {"type": "Ready", "status": "True"}.items() <= c.items() for s in said for c in s
        )

    def _is_counted(self) -> bool:
        budget = self.pool.child("PodDisruptionBudget", "decode")
        status = budget.get("status", {})
        seen = status.get("observedGeneration") == budget["metadata"]["generation"]
        counted = status.get("currentHealthy") == self._ready_nodes()
        return seen and counted and not status.get("disruptedPods")


def names(pods: list[Body]) -> list[str]:
    return sorted(one["metadata"]["name"] for one in pods)


@contextmanager
def silent_index(port: int) -> Iterator[None]:
    """The Redis of that port, which this process has started, answers nobody."""
    [server] = [
        process
        for process in psutil.Process().children(recursive=True)
        if any(str(port) in word for word in process.cmdline())
    ]
    server.suspend()
    try:
        yield
    finally:
        server.resume()
