"""The operator as a process beside a control plane, and the objects that it creates.

In: a kubeconfig (of the API server, or of a proxy in front of it). Out: `baton operator`, which
tests can start, kill and restart; a pool's children as stored in the API server.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil

from baton_cli.commands.up import reserve_port
from baton_operator.kube.kinds import CHILDREN, EVENT, HTTP_ROUTE, POD, POOL, ObjectKind
from baton_operator.names import API_VERSION, POOL_KIND
from tests.cluster.fault_proxy import Call, Fault, FaultProxy
from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.processes import Processes
from tests.support.needs import needs

Body = dict[str, Any]
WAIT_S = 120.0
LOG_TAIL = 6000
NAME = "operator"
SYSTEM = "baton-system"
SIM: Mapping[str, Any] = {"engine": {"kind": "sim"}}
IMAGES = ("--node-image=node:1", "--router-image=router:1", "--redis-image=redis:7")
# The components of a simulated pool with a managed store.
COMPONENTS = ("prefill", "decode", "router", "kv-index", "kv-data")

# A minimal definition of the Gateway API's HTTPRoute, with which the API server stores routes.
ROUTES = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": f"{HTTP_ROUTE.plural}.{HTTP_ROUTE.group}",
        "annotations": {"api-approved.kubernetes.io": "unapproved, for a test"},
    },
    "spec": {
        "group": HTTP_ROUTE.group,
        "scope": "Namespaced",
        "names": {"kind": HTTP_ROUTE.kind, "plural": HTTP_ROUTE.plural},
        "versions": [
            {
                "name": HTTP_ROUTE.version,
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}


class Operator:
    """`with Operator(kubeconfig, folder) as one:` starts it; call `start` again after `kill`."""

    def __init__(
        self,
        kubeconfig: Path,
        folder: Path,
        *flags: str,
        system: str = SYSTEM,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`system` is the operator's own namespace; `environment` is added to this process's."""
        needs("own_cluster")  # it manages the pools of all namespaces
        self._processes = Processes(folder / "logs", str(folder))
        self._log = folder / "logs" / f"{NAME}.log"
        self._ports = [reserve_port("127.0.0.1", 0) for _ in range(2)]
        self.health_port, self.metrics_port = (port.getsockname()[1] for port in self._ports)
        self._command = [
            "env",
            f"KUBECONFIG={kubeconfig}",
            f"POD_NAMESPACE={system}",
            *(f"{name}={value}" for name, value in (environment or {}).items()),
            *(sys.executable, "-m", "baton_cli", "operator", "--json-logs", *IMAGES),
            "--index-networks=127.0.0.0/8",  # the address of the tests' Redis
            f"--health-port={self.health_port}",
            f"--metrics-port={self.metrics_port}",
            *flags,
        ]
        self.pid = 0

    def __enter__(self) -> Operator:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()
        print_log(self)
        for port in self._ports:
            port.close()

    def start(self) -> None:
        self.pid = self._processes.start(NAME, self._command)

    def kill(self) -> None:
        self._processes.stop(NAME)

    def kill_at(
        self,
        proxy: FaultProxy,
        fault: Fault,
        act: Callable[[], object],
        *,
        method: str = "",
        path: str = "",
        number: int = 1,
    ) -> None:
        """Call `act`, and kill the operator at the `number`-th write of this method to a path that
        contains `path`. `fault` decides whether the API server gets this write; the operator gets
        no answer."""
        died, left = threading.Event(), number

        def watch(call: Call) -> Fault | None:
            nonlocal left
            wanted = call.writes and method in ("", call.method) and path in call.path
            if died.is_set() or not wanted:
                return None
            left -= 1
            if left:
                return None
            self.kill()
            died.set()
            return fault

        proxy.watch(watch)
        act()
        until(died.is_set, f"write number {number}: {method} {path}")
        proxy.watch(None)

    def terminate(self) -> None:
        """Send SIGTERM and wait until the operator has ended."""
        process = psutil.Process(self.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
        self._processes.stop(NAME)

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def rss(self) -> int:
        """Resident memory in bytes. The process `env` has replaced itself by the operator."""
        size: int = psutil.Process(self.pid).memory_info().rss
        return size


class ApiClient:
    """The API by HTTP through `kubectl proxy`, which is much cheaper than a kubectl per request."""

    def __init__(self, kubeconfig: Path, programs: Path, folder: Path) -> None:
        self._processes = Processes(folder / "api-client", str(folder))
        reserved = reserve_port("127.0.0.1", 0)
        self._url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        self._reserved = reserved
        port = reserved.getsockname()[1]
        args = [f"--kubeconfig={kubeconfig}", "proxy", f"--port={port}"]
        self._command = [str(programs / "kubectl"), *args]

    def __enter__(self) -> ApiClient:
        self._processes.start("proxy", self._command)
        until(self._answers, "kubectl proxy")
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()
        self._reserved.close()

    def get(self, path: str) -> Body:
        """Read an object or a list. Retry while the answer is 429, which the server gives until the
        storage of a new definition is ready."""
        bodies: list[Body] = []

        def answered() -> bool:
            try:
                bodies.append(self.send("GET", path))
            except HTTPError as error:
                if error.code != HTTPStatus.TOO_MANY_REQUESTS:
                    raise
            return bool(bodies)

        until(answered, f"an answer to {path}")
        return bodies[0]

    def send(self, method: str, path: str, body: Body | None = None, kind: str = "json") -> Body:
        """Raise HTTPError."""
        data = json.dumps(body).encode() if body is not None else None
        request = Request(f"{self._url}{path}", data, method=method)
        request.add_header("Content-Type", f"application/{kind}")
        with urlopen(request, timeout=WAIT_S) as answer:
            found: Body = json.load(answer)
            return found

    def _answers(self) -> bool:
        try:
            return bool(self.get("/version"))
        except OSError:
            return False


class Pool:
    """One InferencePool and its children."""

    def __init__(
        self, cluster: Kubernetes, api_client: ApiClient, namespace: str, name: str = "pool"
    ) -> None:
        self.name = name
        self.namespace = namespace
        self._cluster = cluster
        self._api_client = api_client

    def apply(self, spec: Mapping[str, Any]) -> None:
        """Create the pool, or replace its whole spec: fields that are left out are removed."""
        head = {"apiVersion": API_VERSION, "kind": POOL_KIND, "metadata": {"name": self.name}}
        body = {**head, "spec": dict(spec)}
        try:
            self._replace(body)
        except HTTPError as error:
            if error.code != 404:
                raise
            self._api_client.send("POST", POOL.path(self.namespace), body)

    def _replace(self, body: Body) -> None:
        for _ in range(10):
            try:
                version = self.body()["metadata"]["resourceVersion"]
                metadata = body["metadata"] | {"resourceVersion": version}
                self._api_client.send("PUT", self._path, body | {"metadata": metadata})
                return
            except HTTPError as error:
                # The operator has written a status since we read the version.
                if error.code != 409:
                    raise
        raise AssertionError("the pool changed before each of 10 writes")

    def patch(self, spec: Mapping[str, Any]) -> None:
        self._api_client.send("PATCH", self._path, {"spec": dict(spec)}, "merge-patch+json")

    def delete(self) -> None:
        self.kubectl("delete", "bpool", self.name, "--wait=false", "--ignore-not-found")

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self._cluster.kubectl("-n", self.namespace, *args, stdin=stdin)

    def body(self) -> Body:
        return self._api_client.get(self._path)

    def condition(self, kind: str) -> Body:
        conditions = self.body().get("status", {}).get("conditions", [])
        return next((one for one in conditions if one["type"] == kind), {})

    def children(self) -> dict[str, Body]:
        """All children without pods, by "Kind/name"."""
        found = {}
        for kind in CHILDREN:
            if kind.made:
                for one in self._list(kind):
                    found[f"{kind.kind}/{one['metadata']['name']}"] = one | {"kind": kind.kind}
        return found

    def of_kind(self, kind: str) -> list[Body]:
        """The pool's children of this kind."""
        return self._list(_kind(kind))

    def child(self, kind: str, component: str) -> Body:
        """The only child of this kind and component; {} if there is none, or more than one."""
        found = [
            one | {"kind": kind}
            for one in self.of_kind(kind)
            if one["metadata"]["labels"]["baton.dev/component"] == component
        ]
        return found[0] if len(found) == 1 else {}

    def one(self, name: str) -> Body:
        """The child named "Kind/name", read with one request; {} if it does not exist."""
        kind, _, own_name = name.partition("/")
        try:
            return self._api_client.get(_kind(kind).path(self.namespace, own_name))
        except HTTPError as error:
            if error.code == 404:
                return {}
            raise

    def pods(self, **labels: str) -> list[Body]:
        """Pods with these baton.dev labels (component, revision), without those being deleted."""
        found = self._list(POD, **labels)
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    def pod(self, name: str) -> Body:
        return self._api_client.get(POD.path(self.namespace, name))

    def patch_pod_status(self, name: str, status: Mapping[str, Any]) -> None:
        """Patch the status subresource, as a kubelet does."""
        path = f"{POD.path(self.namespace, name)}/status"
        self._api_client.send("PATCH", path, {"status": dict(status)}, "merge-patch+json")

    def evict(self, pod: str) -> int:
        """Evict a pod; return the HTTP status of the answer."""
        metadata = {"name": pod, "namespace": self.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        try:
            self._api_client.send("POST", f"{POD.path(self.namespace, pod)}/eviction", body)
        except HTTPError as error:
            return error.code
        return 201

    def events(self, reason: str) -> list[str]:
        """The messages of the events with this reason."""
        items = self._api_client.get(EVENT.path(self.namespace))["items"]
        return [item["note"] for item in items if item["reason"] == reason]

    @property
    def _path(self) -> str:
        return POOL.path(self.namespace, self.name)

    def _list(self, kind: ObjectKind, **labels: str) -> list[Body]:
        wanted = {"pool": self.name, **labels}
        try:
            query = ",".join(f"baton.dev/{name}={value}" for name, value in wanted.items())
            found: list[Body] = self._api_client.get(
                f"{kind.path(self.namespace)}?labelSelector={query}"
            )["items"]
        except HTTPError as error:
            if error.code == 404 and kind.optional:
                return []
            raise
        return found


def _kind(name: str) -> ObjectKind:
    [known] = [child for child in CHILDREN if child.kind == name]
    return known


def until(done: Callable[[], object], what: str, wait_s: float = WAIT_S) -> None:
    """Return once `done()` is true."""
    end = time.monotonic() + wait_s
    while not done():
        assert time.monotonic() < end, f"{what}: not within {wait_s:g} s"
        time.sleep(0.1)


def print_log(operator: Operator) -> None:
    """Print the operator's last log lines, which pytest shows with a failure."""
    print(operator.log()[-LOG_TAIL:])
