"""A pool whose nodes are fake, for an operator that drains them and rolls them out.

The control plane is real, and its controllers create the pods; nothing runs in them. In: what a
test writes in place of kubelets, nodes and routers: pod statuses in the API server, node reports in
a real Redis, and a router's HTTP answers at an address of its own. Out: what the operator did.
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
from tests.operator.index_servers import PASSWORD
from tests.support.nodes.fake_node import make_report

SECRET = "index-login"
ROLES: tuple[Role, ...] = ("prefill", "decode")
FINGERPRINT, OTHER_FINGERPRINT = Fingerprint("5" * 32), Fingerprint("0" * 32)


class RouterCall(NamedTuple):
    """A request of the operator: `action` (drain or resume) on a node, and its JSON body."""

    action: str
    node: str
    token: str
    body: Body


class FakeRouter:
    """Stands in for all routers of a test: answers with `status` and records the calls."""

    def __init__(self) -> None:
        # Derived from the process id, because other test workers listen on the same port.
        number = os.getpid()
        self.address = f"127.{77 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"
        self.status = 200
        self.calls: list[RouterCall] = []

    def targets(self, action: str) -> list[str]:
        """The nodes of the calls of this action, one entry per call."""
        return [call.node for call in self.calls if call.action == action]

    def answer(self, path: str, token: str, body: Body) -> tuple[int, Body]:
        _, _, node, action = path.split("/")
        self.calls.append(RouterCall(action, node, token, body))
        return self.status, {"node": node, "error": {"message": "as the test wants it"}}


@contextmanager
def fake_router() -> Iterator[FakeRouter]:
    router = FakeRouter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")
            status, body = router.answer(self.path, self.headers["Authorization"], request)
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


class FakePool:
    """One pool whose pods and nodes have the states that a test sets."""

    def __init__(self, pool: Pool, index_url: str, router: FakeRouter) -> None:
        self.pool = pool
        self.router = router
        self._index_url = index_url

    def start(self, decode: int = 1, /, **spec: Any) -> str:
        """Create the pool with one prefill node and `decode` decode nodes, all ready and without
        requests; return its revision. Fields of `spec` override or extend the default spec."""
        login = f"--from-literal=password={PASSWORD}"
        self.pool.kubectl("create", "secret", "generic", SECRET, login)
        self.pool.apply(self._spec(decode, spec))
        until(lambda: len(self.decode_pods()) == decode, "the decode nodes' pods")
        until(lambda: self.pods("prefill") and self.pods("router"), "the other pods")
        until(lambda: "revision" in self.pool.body().get("status", {}), "the first status")
        revision = self.revision()
        self.make_ready(revision)
        for pod in self.pods("router"):
            self.set_pod_status(pod, podIP=self.router.address)
        until(lambda: self.pool.condition("Ready").get("status") == "True", "condition Ready")
        return revision

    def _spec(self, decode: int, changes: Body) -> Body:
        store = {
            "indexUrl": self._index_url,
            "dataUrls": ["redis://data.example"],
            "secretRef": {"name": SECRET},
        }
        spec: Body = {
            "engine": {"kind": "sim"},
            "decode": {"replicas": decode},
            "kvStore": {"external": store},
        }
        for name, value in changes.items():
            spec[name] = spec.get(name, {}) | value if isinstance(value, dict) else value
        return spec

    # --- a user's actions -------------------------------------------------------------------------

    def scale(self, decode: int) -> None:
        self.pool.patch({"decode": {"replicas": decode}})

    def roll(self, **spec: Any) -> str:
        """Edit the spec so that a roll-out starts; return the new revision once its Deployments
        exist."""
        old = self.revision()
        self.pool.patch(spec or {"engine": {"blockSize": 32}})
        until(lambda: self.revision() != old, "another revision")
        new = self.revision()
        until(lambda: len(self.deployments(new)) == 2, "its Deployments")
        return new

    def evict(self, pod: str) -> int:
        """Evict a pod as `kubectl drain` does; return the HTTP status. Before that, wait until the
        disruption budget has counted all earlier changes."""
        until(self._is_counted, "the budget's count")
        return self.pool.evict(pod)

    # --- statuses by kubelets and nodes -----------------------------------------------------------

    def set_pod_status(self, pod: str, *, ready: bool = True, **status: Any) -> None:
        """Write a pod's status, as its kubelet would."""
        now = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
        conditions = [{"type": "Ready", "status": "True" if ready else "False", **now}]
        self.pool.patch_pod_status(pod, {"phase": "Running", "conditions": conditions, **status})

    def report(
        self,
        node: str,
        requests: int = 0,
        state: NodeState = "ready",
        fingerprint: Fingerprint = FINGERPRINT,
        wakes: bool = False,
    ) -> None:
        """Register the node's report in the index; role and revision come from the pod's labels."""
        labels = self.pool.pod(node)["metadata"]["labels"]
        report = make_report(
            node,
            labels["baton.dev/component"],
            revision=labels["baton.dev/revision"],
            fingerprint=fingerprint,
            load=NodeLoad(requests=requests),
            state=state,
            asleep=wakes,
            wakes=wakes,
        )

        async def register() -> None:
            url = with_login(self._index_url, "", PASSWORD)
            async with Registry(url, f"{self.pool.namespace}.{self.pool.name}") as registry:
                await registry.register(report, LONGEST_TTL_S)

        asyncio.run(register())

    def make_ready(
        self, revision: str, *roles: Role, fingerprint: Fingerprint = FINGERPRINT
    ) -> None:
        """Make all pods of these roles ready, and register their nodes' reports."""
        for pod in self.node_pods(revision, *roles):
            self.report(pod, fingerprint=fingerprint)
            self.set_pod_status(pod)

    def finish_drains(self, *nodes: str) -> None:
        """Wait until the router was called to drain these nodes, then report them as drained."""
        until(lambda: all(self.drain_request(node) for node in nodes), "the drains")
        for node in nodes:
            self.report(node, state="draining")

    # --- the operator's results -------------------------------------------------------------------

    def decode_pods(self) -> list[str]:
        """Names of the decode nodes' pods, without those being deleted."""
        return self.pods("decode")

    def pods(self, component: str) -> list[str]:
        """Names of the component's pods, without those being deleted."""
        return names(self.pool.pods(component=component))

    def node_pods(self, revision: str, *roles: Role) -> list[str]:
        """Names of the revision's node pods of these roles, without those being deleted."""
        pods = self.pool.pods(revision=revision)
        wanted = roles or ROLES
        return names(
            [pod for pod in pods if pod["metadata"]["labels"]["baton.dev/component"] in wanted]
        )

    def wait_pods(self, revision: str, role: Role, count: int = 1) -> list[str]:
        """Wait until the revision has `count` pods of this role; return their names."""
        until(
            lambda: len(self.node_pods(revision, role)) == count,
            f"{count} {role} pods of {revision}",
        )
        return self.node_pods(revision, role)

    def revision(self) -> str:
        found: str = self.pool.body()["status"]["revision"]
        return found

    def deployments(self, revision: str) -> dict[str, int]:
        """The replicas of the revision's Deployments by role."""
        return {
            one["metadata"]["labels"]["baton.dev/component"]: one["spec"]["replicas"]
            for one in self.pool.of_kind("Deployment")
            if one["metadata"]["labels"].get("baton.dev/revision") == revision
        }

    def decode_replicas(self) -> int:
        found: int = self.pool.child("Deployment", "decode")["spec"]["replicas"]
        return found

    def scaled_reason(self) -> str:
        """The reason of condition Scaled."""
        reason: str = self.pool.condition("Scaled").get("reason", "")
        return reason

    def rollout_blocked(self) -> tuple[str, str]:
        """Status and reason of condition RolloutBlocked."""
        condition = self.pool.condition("RolloutBlocked")
        return condition.get("status", ""), condition.get("reason", "")

    def is_gone(self, revision: str) -> bool:
        """Whether the revision has no Deployment left and the roll-out is over."""
        return not self.deployments(revision) and self.rollout_blocked() == ("False", "NotRolling")

    def drain_annotations(self, pod: str) -> dict[str, str]:
        """The pod's annotations about its drain and deletion cost."""
        found: dict[str, str] = self.pool.pod(pod)["metadata"].get("annotations", {})
        return {name: text for name, text in found.items() if "drain" in name or "cost" in name}

    def drain_request(self, node: str) -> Body:
        """The body of the last call to drain this node; {} without a call."""
        found = [
            call.body for call in self.router.calls if (call.action, call.node) == ("drain", node)
        ]
        return found[-1] if found else {}

    def wait_calls(self, action: str, count: int = 3) -> None:
        """Wait for `count` more calls of this action, repeated at each reconcile."""
        before = len(self.router.targets(action))
        until(lambda: len(self.router.targets(action)) >= before + count, f"{count} times {action}")

    def _ready_nodes(self) -> int:
        pods = self.pool.pods(component="decode")
        conditions = [one for pod in pods for one in pod["status"].get("conditions") or ()]
        return sum(
            {"type": "Ready", "status": "True"}.items() <= condition.items()
            for condition in conditions
        )

    def _is_counted(self) -> bool:
        budget = self.pool.child("PodDisruptionBudget", "decode")
        status = budget.get("status", {})
        seen = status.get("observedGeneration") == budget["metadata"]["generation"]
        counted = status.get("currentHealthy") == self._ready_nodes()
        return seen and counted and not status.get("disruptedPods")


def names(pods: list[Body]) -> list[str]:
    return sorted(pod["metadata"]["name"] for pod in pods)


@contextmanager
def frozen_index(port: int) -> Iterator[None]:
    """Suspend this process's Redis at `port`, so that it answers no request."""
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
