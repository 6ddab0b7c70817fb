"""What is known of a pool's children: the little that reconciling and status need of each object.

In: objects as the API gives them (also as items of a list, which do not say their kind). Out:
frozen records, small enough to keep for 100 pools. Pure; what a pod lacks is found in
`pod_problems`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from baton_operator.api.autoscaling import PlannedMode
from baton_operator.api.fields import gpus_of_pod
from baton_operator.kube.kinds import ChildKey
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
from baton_operator.state.pod_problems import Body, condition, problem_of
from baton_protocol.store import FetchReport, NodeReport, Role

# "" where the pod fetches no model.
Fetch = Literal["", "waiting", "running", "done"]
# unplaced: on no cluster node yet. pending: its containers are not all made. over: it has ended,
# and its controller counts it no more.
Stage = Literal["unplaced", "pending", "running", "over"]


class ObservedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment. `instance`: which server for KV bytes. `pods`: how many it has, of old
    templates too; `updated`: of the newest. `current`: its controller has seen the newest spec.
    `problem`: PodsRefused while its controller may not make pods, StartOverdue while none got ready
    for progressDeadlineSeconds; `message` is what it was told.
    `gpus` of each of its pods. `holds`: routers of the newest template hold requests that come
    while there is no node."""

    name: str
    component: str
    revision: str
    desired: int
    pods: int
    ready: int
    updated: int
    current: bool
    instance: str = ""
    problem: str = ""
    message: str = ""
    gpus: int = 0
    holds: bool = False

    @property
    def rolled(self) -> bool:
        """No pod of an older template is left; only those that end may be."""
        return self.current and self.pods == self.updated


class FirstSeen(msgspec.Struct, frozen=True, kw_only=True):
    """When this operator first saw a pod as it is now, in seconds of its own monotonic clock.

    The moments that a pod's object holds are those of other machines' clocks: a kubelet's, the API
    server's, an earlier leader's. They are shown and compared for equality; how long something has
    lasted is measured by these. An operator that begins anew measures from its beginning.
    """

    created: float = 0.0
    readiness: float = 0.0  # ready, or not, since then
    unprepared: float = 0.0
    drain: float = 0.0


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    """`problem` is a reason of `pod_problems` why it does not get ready ("" while nothing is
    wrong); `message` says more. `unprepared_since` is when the kubelet began, in vain so far, to
    make volumes, secrets and network: it tells what is missing in events alone. `drain_since` is
    when it was marked to go ("" where it was not), `drain_reason` why it and no other; in a
    roll-out `replaced_by` says for which revision, and `drain_seconds` how long its requests may
    take ("" else). `unready_since` is "" while it is ready, or nobody has said anything;
    `ready_since` while it is not."""

    name: str
    component: str
    revision: str
    ready: bool
    terminating: bool
    instance: str = ""
    problem: str = ""
    message: str = ""
    fetch: Fetch = ""
    unprepared_since: str = ""
    stage: Stage = "running"
    address: str = ""
    drain_since: str = ""
    drain_reason: str = ""
    drain_seconds: str = ""
    replaced_by: str = ""
    unready_since: str = ""
    ready_since: str = ""
    gpus: int = 0
    seen: FirstSeen = FirstSeen()

    @property
    def ends(self) -> bool:
        """It takes nothing new any more, or is about to."""
        return self.terminating or bool(self.drain_since)


class ObservedScaler(msgspec.Struct, frozen=True, kw_only=True):
    """A PoolScaler. `wanted` is what somebody wrote into it, the rest what we did."""

    wanted: int
    replicas: int
    selector: str


class ObservedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """An Ingress or HTTPRoute. `accepted` is None while nobody has said so or otherwise."""

    kind: Literal["Ingress", "HTTPRoute"]
    accepted: bool | None
    message: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A child that the API server did not take: its own words."""

    child: ChildKey
    code: int
    message: str


class Departure(msgspec.Struct, frozen=True):
    """What keeps a role's surplus nodes from going, beside their requests; `held`: it does not pass
    by itself."""

    role: Role
    words: str
    held: bool


class Roll(msgspec.Struct, frozen=True, kw_only=True):
    """How it is with a pool's roll-out. `rolling`: nodes of older revisions serve. `no_room`: what
    the GPU budget lacks for it. `short`: roles that get fewer nodes than wanted by that budget."""

    rolling: bool = False
    no_room: str = ""
    short: tuple[Role, ...] = ()


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner decided last."""

    mode: PlannedMode
    prefill: int
    decode: int
    reason: str
    message: str
    numbers: str = ""

    def like(self, other: Planned) -> bool:
        """The same counts for the same reason."""
        counts, others = (self.prefill, self.decode), (other.prefill, other.decode)
        return counts == others and self.reason == other.reason


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's children at one moment. `nodes` and `fetches` are None where the index was not
    asked or did not answer; `silent` where it did not several times in a row.
    `address` is that of the router's LoadBalancer, "" without one. `planned` is None where nobody
    plans for the pool, or it is paused."""

    workloads: tuple[ObservedWorkload, ...] = ()
    pods: tuple[ObservedPod, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    nodes: tuple[NodeReport, ...] | None = None
    fetches: tuple[FetchReport, ...] | None = None
    routes: tuple[ObservedRoute, ...] = ()
    address: str = ""
    silent: bool = False
    departures: tuple[Departure, ...] = ()
    roll: Roll = Roll()
    planned: Planned | None = None

    @property
    def drains(self) -> bool:
        """Nodes are to go, or about to be chosen."""
        return bool(self.departures) or any(pod.drain_since for pod in self.pods)

    @property
    def held(self) -> bool:
        """Nodes are to go and cannot."""
        return any(each.held for each in self.departures)


def read_workload(body: Body) -> ObservedWorkload:
    """A Deployment of ours."""
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
    refused = condition(status, "ReplicaFailure")
    if refused.get("status") == "True":
        return "PodsRefused", refused.get("message", "")
    if condition(status, "Progressing").get("reason") == "ProgressDeadlineExceeded":
        return "StartOverdue", f"not ready after {spec.get('progressDeadlineSeconds')} s"
    return "", ""


def read_pod(body: Body) -> ObservedPod:
    """A pod of ours. One that is ending has no problem."""
    metadata, status = body["metadata"], body.get("status") or {}
    terminating = "deletionTimestamp" in metadata
    problem = None if terminating else problem_of(body)
    ready = condition(status, "Ready")
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


def seen_pod(pod: ObservedPod, before: ObservedPod | None, now_s: float) -> ObservedPod:
    """The pod with when it was first `seen`; `before` is how the same pod was known."""
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
    """An Ingress or HTTPRoute of ours. No controller has to say anything about an Ingress; those
    that do write an address."""
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
    """Of a Service: where its LoadBalancer listens, "" for another Service or while unknown."""
    balances = (body.get("spec") or {}).get("type") == "LoadBalancer"
    return _address(body.get("status") or {}) if balances else ""


def _label(metadata: Body, name: str) -> str:
    value: str = (metadata.get("labels") or {}).get(name, "")
    return value


def _annotation(metadata: Body, name: str) -> str:
    value: str = (metadata.get("annotations") or {}).get(name, "")
    return value


def _holds(pod: Body) -> bool:
    words = (word for one in pod.get("containers") or () for word in one.get("args") or ())
    return any(word.startswith(f"--{WAKE_WAIT_FLAG}") for word in words)


def _stage(body: Body) -> Stage:
    phase = (body.get("status") or {}).get("phase")
    if phase in ("Succeeded", "Failed"):
        return "over"
    if phase == "Running":
        return "running"
    return "pending" if body["spec"].get("nodeName") else "unplaced"


def _address(status: Body) -> str:
    """The first that a load balancer has."""
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
    placed = condition(status, "PodScheduled").get("status") == "True"
    prepared = condition(status, "PodReadyToStartContainers")
    if not placed or prepared.get("status") != "False":
        return ""
    since: str = prepared.get("lastTransitionTime") or ""
    return since


def _accepted(metadata: Body, parents: int, status: Body) -> tuple[bool | None, str]:
    """By all Gateways, with what the first that does not says. What was said of an older
    generation does not count."""
    newest = metadata.get("generation", 0)
    accepting = 0
    for parent in status.get("parents") or ():
        for kind in ("Accepted", "ResolvedRefs"):
            found = condition(parent, kind)
            if found.get("observedGeneration", newest) < newest:
                continue
            if found.get("status") == "False":
                return False, f"{found.get('reason', kind)}: {found.get('message', '')}"
            accepting += kind == "Accepted" and found.get("status") == "True"
    return (True, "") if accepting >= parents else (None, "")
