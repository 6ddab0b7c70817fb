"""Everything that a namespace shows to whoever may read it.

In: a cluster, a namespace. Out: the names of all its objects, of every kind there is; all their
text, and what all containers said.
"""

from __future__ import annotations

import json

from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.clients.http import Json

# What happened stays on record when its object is gone.
RECORDS = ("events", "events.events.k8s.io")


def kinds(kubernetes: Kubernetes, *words: str) -> list[str]:
    """All that can be listed; `words` are more flags of `kubectl api-resources`."""
    found = kubernetes.kubectl("api-resources", "--verbs=list", "-o", "name", *words).split()
    return sorted(set(found))


def object_names(kubernetes: Kubernetes, namespace: str) -> set[str]:
    """Of every kind but events."""
    wanted = [one for one in kinds(kubernetes, "--namespaced=true") if one not in RECORDS]
    words = ("get", ",".join(wanted), "-n", namespace, "-o", "name", "--ignore-not-found")
    return set(kubernetes.kubectl(*words).split())


def cluster_object_names(kubernetes: Kubernetes) -> set[str]:
    """Of what belongs to no namespace. Namespaces come and go with other tests."""
    wanted = [one for one in kinds(kubernetes, "--namespaced=false") if one != "namespaces"]
    words = ("get", ",".join(wanted), "-o", "name", "--ignore-not-found")
    return set(kubernetes.kubectl(*words).split())


def shown(kubernetes: Kubernetes, namespace: str) -> dict[str, str]:
    """Text by where it is found: each object, events too, and each container's log, also that of
    the run before. Secrets hold secrets, and are left out."""
    wanted = [one for one in kinds(kubernetes, "--namespaced=true") if one != "secrets"]
    words = (
        "get",
        ",".join(wanted),
        "-n",
        namespace,
        "--ignore-not-found",
        "--show-managed-fields",
    )
    items = json.loads(kubernetes.kubectl(*words, "-o", "json"))["items"]
    found = {f"{one['kind']} {one['metadata']['name']}": json.dumps(one) for one in items}
    for pod in (one for one in items if one["kind"] == "Pod"):
        found |= _logs(kubernetes, namespace, pod)
    return found


def _logs(kubernetes: Kubernetes, namespace: str, pod: Json) -> dict[str, str]:
    name, found = pod["metadata"]["name"], {}
    for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
        words = ("logs", name, "-n", namespace, f"--container={container['name']}", "--tail=-1")
        found[f"log of {name} {container['name']}"] = kubernetes.kubectl(*words)
        try:
            before = kubernetes.kubectl(*words, "--previous")
        except CommandFailed:
            continue  # it is its first run
        found[f"log of the former {name} {container['name']}"] = before
    return found
