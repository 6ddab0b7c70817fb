"""Reads everything that a namespace shows to its readers.

In: a cluster, a namespace. Out: the names of its objects of every kind; their text; and the logs of
all containers.
"""

from __future__ import annotations

import json

from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.clients.http import Json

# Events outlive the objects that they are about.
RECORDS = ("events", "events.events.k8s.io")


def kinds(kubernetes: Kubernetes, *arguments: str) -> list[str]:
    """The kinds that can be listed; `arguments` are more flags of `kubectl api-resources`."""
    found = kubernetes.kubectl("api-resources", "--verbs=list", "-o", "name", *arguments).split()
    return sorted(set(found))


def object_names(kubernetes: Kubernetes, namespace: str) -> set[str]:
    """The names of the namespace's objects of every kind but events."""
    selected = [one for one in kinds(kubernetes, "--namespaced=true") if one not in RECORDS]
    arguments = ("get", ",".join(selected), "-n", namespace, "-o", "name", "--ignore-not-found")
    return set(kubernetes.kubectl(*arguments).split())


def cluster_object_names(kubernetes: Kubernetes) -> set[str]:
    """The names of cluster-scoped objects, without namespaces, which other tests create."""
    selected = [one for one in kinds(kubernetes, "--namespaced=false") if one != "namespaces"]
    arguments = ("get", ",".join(selected), "-o", "name", "--ignore-not-found")
    return set(kubernetes.kubectl(*arguments).split())


def shown(kubernetes: Kubernetes, namespace: str) -> dict[str, str]:
    """Return texts by their source: each object, events included, and each container's log, also of
    its previous run. Secrets are left out, because they hold secrets."""
    selected = [one for one in kinds(kubernetes, "--namespaced=true") if one != "secrets"]
    arguments = (
        "get",
        ",".join(selected),
        "-n",
        namespace,
        "--ignore-not-found",
        "--show-managed-fields",
    )
    items = json.loads(kubernetes.kubectl(*arguments, "-o", "json"))["items"]
    found = {f"{one['kind']} {one['metadata']['name']}": json.dumps(one) for one in items}
    for pod in (one for one in items if one["kind"] == "Pod"):
        found |= _logs(kubernetes, namespace, pod)
    return found


def _logs(kubernetes: Kubernetes, namespace: str, pod: Json) -> dict[str, str]:
    name, found = pod["metadata"]["name"], {}
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        arguments = ("logs", name, "-n", namespace, f"--container={container['name']}", "--tail=-1")
        found[f"log of {name} {container['name']}"] = kubernetes.kubectl(*arguments)
        try:
            before = kubernetes.kubectl(*arguments, "--previous")
        except CommandFailed:
            continue  # the container has no previous run
        found[f"log of the former {name} {container['name']}"] = before
    return found
