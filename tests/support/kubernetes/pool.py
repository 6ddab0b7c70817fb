"""A pool on a cluster as its user sees it: kubectl's output, and the router's address.

In: a cluster, a namespace, a spec. Out: the printed columns, conditions, pods, the URL of the
Service. Every wait is bounded; a failed wait shows the output of `kubectl get`, `describe` and
`logs`.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple
from urllib.error import URLError

from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.clients.http import Json
from tests.support.kubernetes.operator import operator_log

HTTP_S = 120.0
READY_S = 400.0
POLL_S = 0.2
LOG_LINES = 40


class Row(NamedTuple):
    """A row of `kubectl get bpool`."""

    name: str
    ready: str
    reason: str
    updated: str
    prefill: str
    decode: str
    model: str
    url: str
    age: str

    @property
    def nodes(self) -> tuple[str, str]:
        """Ready and all nodes, of prefill and of decode."""
        return self.prefill, self.decode


@dataclass(frozen=True)
class Pod:
    name: str
    uid: str
    address: str
    host: str
    ready: bool


class ClusterPool:
    """One InferencePool. `apply` creates it. Leaving the context closes the connection to its
    Service, but does not delete the pool."""

    def __init__(self, kubernetes: Kubernetes, namespace: str, name: str) -> None:
        self.kubernetes = kubernetes
        self.namespace = namespace
        self.name = name
        self._url = ""
        self._stack = ExitStack()

    def __enter__(self) -> ClusterPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        return self.kubernetes.kubectl("-n", self.namespace, *arguments, stdin=stdin)

    def read(self, *arguments: str) -> Json:
        """The JSON output of `kubectl get`."""
        output: Json = json.loads(self.kubectl("get", *arguments, "-o", "json"))
        return output

    # --- the user's actions -----------------------------------------------------------------------

    def apply(self, spec: Json) -> None:
        resource = {
            "apiVersion": "baton.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": self.name},
            "spec": spec,
        }
        self.kubectl("apply", "-f", "-", stdin=json.dumps(resource))

    def patch(self, spec: Json) -> None:
        change = json.dumps({"spec": spec})
        self.kubectl("patch", "bpool", self.name, "--type=merge", f"--patch={change}")

    def delete(self) -> None:
        """Delete the pool; return when all its objects are gone."""
        self.kubectl("delete", "bpool", self.name, "--timeout=300s")
        self.wait(lambda: not self._owned(), "be gone with all its objects")

    def _owned(self) -> str:
        kinds = "deployments,replicasets,pods,services,secrets,networkpolicies,pdb"
        return self.kubectl("get", kinds, "-l", self._label(), "-o", "name")

    # --- what kubectl shows -----------------------------------------------------------------------

    def row(self) -> Row:
        header, line = self.kubectl("get", "bpool", self.name).splitlines()
        starts = [header.index(column) for column in header.split()]
        ends = [*starts[1:], None]
        cells = [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        return Row(*cells)

    def conditions(self) -> dict[str, Json]:
        status = self.read("bpool", self.name).get("status", {})
        return {one["type"]: one for one in status.get("conditions", ())}

    def pods(self, component: str) -> list[Pod]:
        """The component's pods that are not terminating."""
        arguments = ("pods", "-l", self._label(component))
        return [
            _pod(body)
            for body in self.read(*arguments)["items"]
            if "deletionTimestamp" not in body["metadata"]
        ]

    def _label(self, *components: str) -> str:
        picked = [f"baton.dev/component in ({','.join(components)})"] if components else []
        return ",".join([f"baton.dev/pool={self.name}", *picked])

    @property
    def url(self) -> str:
        """The URL at which this machine reaches the router's Service."""
        if not self._url:
            service = f"{self.name}-router"
            [port] = self.read("service", service)["spec"]["ports"]
            connection = self.kubernetes.reach(self.namespace, service, port["port"])
            self._url = self._stack.enter_context(connection)
        return self._url

    def state(self) -> Json:
        """The router's /pool."""
        with urllib.request.urlopen(f"{self.url}/pool", timeout=HTTP_S) as response:
            state: Json = json.loads(response.read())
        return state

    def ready_nodes(self) -> list[str]:
        """The ids of nodes that the router reports ready. Empty if the Service is unreachable:
        after an outage of its API server, a cluster may treat its machines as lost until they
        report again."""
        try:
            nodes = self.state()["nodes"]
        except URLError:
            return []
        return [node["id"] for node in nodes if node["state"] == "ready"]

    def busiest(self, role: str) -> Pod:
        """Wait until a node of the role has work, and return the pod of the busiest one."""
        busiest: list[str] = []

        def busy() -> bool:
            nodes = [node for node in self.state()["nodes"] if node["role"] == role]
            most = max(nodes, key=_work)
            busiest[:] = [most["id"]]
            return _work(most) > 0

        self.wait(busy, f"have work for a {role} node", timeout_s=60)
        return next(pod for pod in self.pods(role) if pod.name == busiest[0])

    def router_log(self) -> list[Json]:
        """The router's log lines about requests."""
        text = self.kubectl("logs", "-l", self._label("router"), "--tail=-1")
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        return [line for line in lines if "attempts" in line]

    def moved(self, requests: Sequence[str]) -> int:
        """The number of these answered requests that had more than one attempt."""
        wanted, lines = set(requests), list[Json]()

        def logged() -> bool:
            lines[:] = [line for line in self.router_log() if line["request"] in wanted]
            return len(lines) == len(wanted)

        # The router writes the line after it has sent the answer's last bytes.
        self.wait(logged, "log all of these requests", timeout_s=60)
        return sum(line["attempts"] > 1 for line in lines)

    # --- waiting ----------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], what: str, timeout_s: float = READY_S) -> None:
        """Poll until `done()`; after `timeout_s` raise AssertionError with kubectl's output."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{self.name} did not {what} within {timeout_s:g} s\n{self.describe()}"
                )
            time.sleep(POLL_S)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until the operator reports the current spec ready, no old pods are left, and the
        Service reaches a router."""
        self.wait(self._settled, "become ready", timeout_s)
        self.wait(self._reached, "answer at its Service", timeout_s=60)

    def _settled(self) -> bool:
        body = self.read("bpool", self.name)
        status = body.get("status", {})
        truth = {one["type"]: one["status"] for one in status.get("conditions", ())}
        observed: bool = status.get("observedGeneration") == body["metadata"]["generation"]
        return observed and truth["Ready"] == "True" and truth["Updated"] == "True"

    def _reached(self) -> bool:
        """Whether the Service answers. kube-proxy learns of ready pods after the API server, and
        until then refuses connections to the Service."""
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=HTTP_S).close()
        except URLError:
            return False
        return True

    def describe(self) -> str:
        """Describe the pool, its events and its logs, for a failure's message."""
        commands = [
            ("get", "bpool,deployments,pods,services", "-o", "wide"),
            ("describe", "bpool", self.name),
            ("get", "events", "--sort-by=.lastTimestamp"),
            *(
                ("logs", pod, "--all-containers", "--prefix", f"--tail={LOG_LINES}")
                for pod in self._try("get", "pods", "-o", "name").split()
            ),
        ]
        outputs = [
            f"$ kubectl {' '.join(arguments)}\n{self._try(*arguments)}" for arguments in commands
        ]
        return "\n".join([*outputs, operator_log(self.kubernetes)])

    def _try(self, *arguments: str) -> str:
        try:
            return self.kubectl(*arguments)
        except CommandFailed as error:
            return str(error)


def _work(node: Json) -> int:
    """The number of requests that the router has booked on a node or that the node runs."""
    work: int = node["booked"]["requests"] + node["load"]["running"]
    return work


def _pod(body: Json) -> Pod:
    status = body["status"]
    ready = any(
        one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ())
    )
    return Pod(
        name=body["metadata"]["name"],
        uid=body["metadata"]["uid"],
        address=status.get("podIP", ""),
        host=body["spec"].get("nodeName", ""),
        ready=ready,
    )
