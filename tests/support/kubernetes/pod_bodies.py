"""Pods, workloads and routes as scheduler, kubelet and controllers of a real cluster write them.

In: states of containers. Out: API objects with the status fields of Kubernetes 1.36. The messages
were observed on real clusters.
"""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]
THEN = "2026-05-04T10:00:00Z"
NODE_IMAGE = "registry.example/baton-node:0.1.0"
UNSCHEDULABLE = (
    "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu."
    " no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful"
    " for scheduling."
)
NOT_FOUND = (
    f'failed to pull and unpack image "{NODE_IMAGE}": failed to resolve image: {NODE_IMAGE}:'
    " not found"
)
FETCH_FAILED = "baton: hf://acme/tiny: the hub answered 401: check model.secretRef"


def waiting(reason: str, message: str = "") -> Body:
    return {"waiting": {"reason": reason} | ({"message": message} if message else {})}


def terminated(code: int, reason: str = "Error", message: str = "", **fields: Any) -> Body:
    ended = {"exitCode": code, "reason": reason, "startedAt": THEN, "finishedAt": THEN} | fields
    return {"terminated": ended | ({"message": message} if message else {})}


RUNNING: Body = {"running": {"startedAt": THEN}}
CREATING = waiting("ContainerCreating")
LOOPING = waiting(
    "CrashLoopBackOff",
    "back-off 40s restarting failed container=node pod=demo_serving(0f)",
)


def container(
    state: Body, last: Body | None = None, *, name: str = "node", ready: bool = False
) -> Body:
    return {
        "name": name,
        "image": NODE_IMAGE,
        "imageID": "",
        "ready": ready,
        "started": ready,
        "restartCount": 0 if last is None else 3,
        "state": state,
        "lastState": last or {},
    }


def conditions(**statuses: str | Body) -> list[Body]:
    """Build conditions. Each type maps to a status, or to fields that differ from status False."""
    return [
        {"type": kind, "lastProbeTime": None, "lastTransitionTime": THEN}
        | ({"status": fields} if isinstance(fields, str) else {"status": "False"} | fields)
        for kind, fields in statuses.items()
    ]


def pod(
    *containers: Body,
    name: str = "demo-decode-1a2b3c4d5e-x7k2p",
    component: str = "decode",
    revision: str = "1a2b3c4d5e",
    init: tuple[Body, ...] = (),
    limits: dict[str, str] | None = None,
    status: Body | None = None,
    **metadata: Any,
) -> Body:
    """A pod. `containers` are container statuses. Without `status`, the pod is scheduled and
    initialized, and ready if all containers are."""
    ready = bool(containers) and all(item["ready"] for item in containers)
    unready = {"reason": "ContainersNotReady", "message": "containers with unready status: [node]"}
    built: Body = {
        "phase": "Running" if any("running" in item["state"] for item in containers) else "Pending",
        "conditions": conditions(
            PodReadyToStartContainers="True",
            Initialized="True",
            Ready="True" if ready else unready,
            ContainersReady="True" if ready else unready,
            PodScheduled="True",
        ),
        "containerStatuses": list(containers),
    }
    if init:
        built["initContainerStatuses"] = list(init)
    labels = {"baton.dev/pool": "demo", "baton.dev/component": component}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "serving",
            "labels": labels | ({"baton.dev/revision": revision} if revision else {}),
        }
        | metadata,
        "spec": {
            "initContainers": [{"name": item["name"]} for item in init],
            "containers": [
                {"name": item["name"], "resources": {"limits": limits or {}}} for item in containers
            ],
        },
        "status": built | (status or {}),
    }


def unplaced(message: str, reason: str = "Unschedulable") -> Body:
    """A pod that the scheduler cannot place on any node."""
    condition = {"reason": reason, "message": message}
    return pod(status={"phase": "Pending", "conditions": conditions(PodScheduled=condition)})


def workload(name: str, component: str, **status: Any) -> Body:
    """A Deployment with 2 replicas whose latest generation its controller has observed."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name,
            "namespace": "serving",
            "generation": 3,
            "labels": {"baton.dev/component": component, "baton.dev/revision": "1a2b3c4d5e"},
        },
        "spec": {"replicas": 2},
        "status": {"observedGeneration": 3} | status,
    }


def http_route(*parents: Body, generation: int = 2) -> Body:
    """An HTTPRoute with two parentRefs, and the given parent statuses."""
    return {
        "metadata": {"name": "demo-router", "namespace": "serving", "generation": generation},
        "spec": {"parentRefs": [{"name": "public"}, {"name": "internal"}]},
        "status": {"parents": list(parents)},
    }


def parent(name: str, generation: int = 2, **statuses: str | Body) -> Body:
    parent_conditions = [
        item | {"observedGeneration": generation} for item in conditions(**statuses)
    ]
    return {
        "parentRef": {"name": name},
        "controllerName": "example.net/gateway",
        "conditions": parent_conditions,
    }
