"""Reads the records of `observed` from objects as the API returns them. Pure.

Items of a list lack their kind, so a reader does not look at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_operator.api.resources import gpus_of_pod
from baton_operator.kube.objects import Body, find_condition
from baton_operator.names import (
    COMPONENT_LABEL,
    DRAIN_REASON_ANNOTATION,
    DRAIN_SECONDS_ANNOTATION,
    DRAIN_SINCE_ANNOTATION,
    FETCH_CONTAINER,
    INSTANCE_LABEL,
    REPLACED_BY_ANNOTATION,
    REVISION_LABEL,
    WAKE_WAIT_FLAG,
)
from baton_operator.state.observed import (
    Fetch,
    FirstSeen,
    ObservedPod,
    ObservedRoute,
    ObservedScaler,
    ObservedWorkload,
    Stage,
)
from baton_operator.state.pod_problem import problem_of


def read_workload(body: Body) -> ObservedWorkload:
    """Read a Deployment of ours."""
    metadata, status = body["metadata"], body.get("status") or {}
    problem, message = _workload_problem(body["spec"], status)
    pod = (body["spec"].get("template") or {}).get("spec") or {}
    return ObservedWorkload(
        name=metadata["name"],
        component=_label(metadata, COMPONENT_LABEL),
        revision=_label(metadata, REVISION_LABEL),
        desired=body["spec"].get("replicas", 1),
        pods=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        current=status.get("observedGeneration", 0) >= metadata.get("generation", 0),
        instance=_label(metadata, INSTANCE_LABEL),
        problem=problem,
        message=message,
        gpus=gpus_of_pod(pod),
        holds=_holds(pod),
    )


def _workload_problem(spec: Body, status: Body) -> tuple[str, str]:
    refused = find_condition(status, "ReplicaFailure")
    if refused.get("status") == "True":
        return "PodsRefused", refused.get("message", "")
    if find_condition(status, "Progressing").get("reason") == "ProgressDeadlineExceeded":
        return "StartOverdue", f"not ready after {spec.get('progressDeadlineSeconds')} s"
    return "", ""


def read_pod(body: Body) -> ObservedPod:
    """Read a pod of ours. A terminating pod has no problem."""
    metadata, status = body["metadata"], body.get("status") or {}
    terminating = "deletionTimestamp" in metadata
    problem = None if terminating else problem_of(body)
    ready = find_condition(status, "Ready")
    is_ready = ready.get("status") == "True"
    return ObservedPod(
        name=metadata["name"],
        component=_label(metadata, COMPONENT_LABEL),
        revision=_label(metadata, REVISION_LABEL),
        ready=is_ready,
        terminating=terminating,
        instance=_label(metadata, INSTANCE_LABEL),
        problem=problem.reason if problem else "",
        message=problem.message if problem else "",
        fetch=_fetch(body),
        unprepared_since="" if terminating or problem else _unprepared_since(status),
        stage=_stage(body),
        address=status.get("podIP") or "",
        drain_since=_annotation(metadata, DRAIN_SINCE_ANNOTATION),
        drain_reason=_annotation(metadata, DRAIN_REASON_ANNOTATION),
        drain_seconds=_annotation(metadata, DRAIN_SECONDS_ANNOTATION),
        replaced_by=_annotation(metadata, REPLACED_BY_ANNOTATION),
        unready_since="" if is_ready else ready.get("lastTransitionTime") or "",
        ready_since=ready.get("lastTransitionTime") or "" if is_ready else "",
        gpus=gpus_of_pod(body["spec"]),
    )


def keep_first_seen(pod: ObservedPod, before: ObservedPod | None, now_s: float) -> ObservedPod:
    """The pod with its `seen` times; `before` is the last known state of the same pod."""
    if before is None:
        first = FirstSeen(created=now_s, readiness=now_s, unprepared=now_s, drain=now_s)
        return msgspec.structs.replace(pod, seen=first)
    known = before.seen
    ready = pod.ready, pod.ready_since, pod.unready_since
    seen = FirstSeen(
        created=known.created,
        readiness=known.readiness
        if ready == (before.ready, before.ready_since, before.unready_since)
        else now_s,
        unprepared=known.unprepared if pod.unprepared_since == before.unprepared_since else now_s,
        drain=known.drain if pod.drain_since == before.drain_since else now_s,
    )
    return msgspec.structs.replace(pod, seen=seen)


def read_route(body: Body) -> ObservedRoute:
    """Read an Ingress or HTTPRoute of ours. Controllers need not report on an Ingress; those that
    do write an address."""
    spec, status = body.get("spec") or {}, body.get("status") or {}
    if "parentRefs" in spec:
        accepted, message = _accepted(body["metadata"], len(spec["parentRefs"]), status)
        return ObservedRoute(kind="HTTPRoute", accepted=accepted, message=message)
    address = _address(status)
    return ObservedRoute(kind="Ingress", accepted=True if address else None, message=address)


def read_scaler(body: Body) -> ObservedScaler:
    status = body.get("status") or {}
    return ObservedScaler(
        wanted=body["spec"]["replicas"],
        replicas=status.get("replicas", 0),
        selector=status.get("selector", ""),
    )


def read_address(body: Body) -> str:
    """The address of a Service's LoadBalancer; "" for other Services or while unknown."""
    balances = (body.get("spec") or {}).get("type") == "LoadBalancer"
    return _address(body.get("status") or {}) if balances else ""


def _label(metadata: Body, name: str) -> str:
    value: str = (metadata.get("labels") or {}).get(name, "")
    return value


def _annotation(metadata: Body, name: str) -> str:
    value: str = (metadata.get("annotations") or {}).get(name, "")
    return value


def _holds(pod: Body) -> bool:
    args = (arg for container in pod.get("containers") or () for arg in container.get("args") or ())
    return any(arg.startswith(f"--{WAKE_WAIT_FLAG}") for arg in args)


def _stage(body: Body) -> Stage:
    phase = (body.get("status") or {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        return "over"
    if phase == "Running":
        return "running"
    return "pending" if body["spec"].get("nodeName") else "unplaced"


def _address(status: Body) -> str:
    """The load balancer's first address."""
    ingress = (status.get("loadBalancer") or {}).get("ingress") or [{}]
    first: str = ingress[0].get("hostname") or ingress[0].get("ip") or ""
    return first


def _fetch(body: Body) -> Fetch:
    containers = body["spec"].get("initContainers") or ()
    if not any(container["name"] == FETCH_CONTAINER for container in containers):
        return ""
    statuses = (body.get("status") or {}).get("initContainerStatuses") or ()
    for status in statuses:
        if status["name"] == FETCH_CONTAINER:
            state: Mapping[str, Any] = status.get("state") or {}
            if "running" in state:
                return "running"
            if (state.get("terminated") or {}).get("exitCode") == 0:
                return "done"
    return "waiting"


def _unprepared_since(status: Body) -> str:
    placed = find_condition(status, "PodScheduled").get("status") == "True"
    prepared = find_condition(status, "PodReadyToStartContainers")
    if not placed or prepared.get("status") != "False":
        return ""
    since: str = prepared.get("lastTransitionTime") or ""
    return since


def _accepted(metadata: Body, parents: int, status: Body) -> tuple[bool | None, str]:
    """Whether all Gateways accept the route, and the message of the first that rejects it. Reports
    on an older generation are ignored."""
    newest = metadata.get("generation", 0)
    accepting = 0
    for parent in status.get("parents") or ():
        for kind in ("Accepted", "ResolvedRefs"):
            condition = find_condition(parent, kind)
            if condition.get("observedGeneration", newest) < newest:
                continue
            if condition.get("status") == "False":
                return False, f"{condition.get('reason', kind)}: {condition.get('message', '')}"
            accepting += kind == "Accepted" and condition.get("status") == "True"
    return (True, "") if accepting >= parents else (None, "")
