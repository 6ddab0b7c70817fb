"""Records of a pool's children: the part of each object that reconciling and status need.

In: objects as the API returns them (items of a list lack their kind). Out: frozen records, small
enough to keep for 100 pools. Pure.

`problem_of` explains why a pod does not become ready, from what scheduler and kubelet wrote into
its status: the first `Problem`, in the order of a pod's start, or None if nothing is wrong. A pod
that pulls its image or loads its model has no problem.

    Unschedulable      no node has room for it: the scheduler's own words
    VolumeMissing      the same, because of a PersistentVolumeClaim
    ImagePullFailing   its image does not come
    ConfigMissing      a Secret or ConfigMap, or a key of it, is not there
    ContainerRefused   the container runtime cannot make or start the container
    OutOfMemory        a container was killed beyond its memory limit
    ModelFetchFailing  the init container that fetches the model failed
    ConfigInvalid      a container says that its flags or files are wrong: its last line
    Crashing           a container ended: its exit code and last words
    Evicted            the pod is over: its node had no room for it any more, or refused it
    NodeLost           the pod's node is silent

Why volumes, secrets or network of a pod are not there is in none of its fields, but in events:

    ConfigMissing      a volume names a Secret or ConfigMap, or a key of it, that is not there
    NotPrepared        anything else: the kubelet's own words

A container that failed and runs again stays a problem until the pod is ready, so that a crash loop
is not well again in between. Messages leave out what changes by itself (back-off times, counts).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
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
from baton_operator.state.store_check import StoreProblem
from baton_protocol.store import FetchReport, NodeReport, Role

Body = Mapping[str, Any]
LONGEST_MESSAGE = 400
NODE_LOST = "NodeLost"
_PULLS = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "SignatureValidationFailed",
    }
)
# Waiting reasons that are no state of a healthy start, besides pulls and crash loops.
_REFUSALS = frozenset(
    {
        "CreateContainerConfigError",
        "PreCreateHookError",
        "CreateContainerError",
        "PreStartHookError",
        "PostStartHookError",
        "RunContainerError",
    }
)
# Both reasons of a failing pull alternate; this makes their messages one.
_PULL_NOISE = re.compile(
    r'^Back-off pulling image "[^"]*": (?=\S)|ErrImagePull: |rpc error: code = \w+ desc = '
)
_MISSING = re.compile(r"not found|couldn't find key|non-existent config key")
# Of volumes: a file that is "not found" is no Secret.
_MISSING_VOLUME = re.compile(
    r'(?:secret|configmap) "[^"]*" not found|references non-existent (?:secret|config) key'
)
# Each attempt to create a pod's sandbox has its own ID.
_SANDBOX_ID = re.compile(r' "?[0-9a-f]{64}"?')
# A timeout's event says less than the event about its cause.
_TIMED_OUT = re.compile(r"timed out waiting for the condition|context deadline exceeded")
# Exit codes for a wrong command line: of our commands, argparse and shells, and EX_USAGE and
# EX_CONFIG of sysexits.h.
_CONFIG_ERRORS = frozenset({2, 64, 78})
_SIGNALS = {9: "SIGKILL", 6: "SIGABRT", 11: "SIGSEGV", 15: "SIGTERM"}


class Problem(msgspec.Struct, frozen=True):
    reason: str
    message: str


def condition(status: Body, kind: str) -> Body:
    """The condition of that type; an empty one if there is none."""
    found = (item for item in status.get("conditions") or () if item["type"] == kind)
    return next(found, {})


def problem_of(pod: Body) -> Problem | None:
    """The problem of a pod that is not terminating."""
    status = pod.get("status") or {}
    if condition(status, "Ready").get("status") == "True":
        return None
    found = next(_problems(pod, status), None)
    return Problem(found.reason, _bounded(found.message)) if found else None


def unprepared_problem(events: Iterable[Body]) -> Problem | None:
    """The problem of a pod that is scheduled but not prepared, from its Warning events
    (events.k8s.io)."""
    warnings = [
        event
        for event in events
        if event.get("reason") != "FailedScheduling"
        # Of a container, such as its failing probe: the pod is prepared, its status is only late.
        and not (event.get("regarding") or {}).get("fieldPath")
    ]
    newest = max(warnings, key=_weight, default=None)
    if newest is None:
        return None
    note = _SANDBOX_ID.sub("", newest.get("note") or "")
    reason = "ConfigMissing" if _MISSING_VOLUME.search(note) else "NotPrepared"
    return Problem(reason, _bounded(f"{newest.get('reason') or 'Failed'}: {note}"))


def _weight(event: Body) -> tuple[bool, str]:
    """Sort key: the most informative event, then the newest."""
    moments = (
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
    )
    last = max((moment for moment in moments if moment), default="")
    return not _TIMED_OUT.search(event.get("note") or ""), last


def _problems(pod: Body, status: Body) -> Iterator[Problem]:
    if status.get("phase") == "Failed":
        parts = [status.get("reason") or "Failed", status.get("message") or ""]
        yield Problem("Evicted", ": ".join(part for part in parts if part))
    yield from _placement(condition(status, "PodScheduled"))
    containers = {item["name"]: item for item in _containers(pod["spec"])}
    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or ():
            yield from _waiting(container)
            yield from _ended(container, containers.get(container["name"]) or {})
    yield from _silence(status)


def _containers(spec: Body) -> Iterator[Body]:
    yield from spec.get("initContainers") or ()
    yield from spec.get("containers") or ()


def _placement(scheduled: Body) -> Iterator[Problem]:
    message = scheduled.get("message") or ""
    if scheduled.get("status") == "False" and message:
        volume = "persistentvolumeclaim" in message.lower()
        yield Problem("VolumeMissing" if volume else "Unschedulable", message)


def _waiting(container: Body) -> Iterator[Problem]:
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason, message = waiting.get("reason") or "", waiting.get("message") or ""
    name = f"container {container['name']}: "
    if reason in _PULLS:
        detail = _PULL_NOISE.sub("", message) or reason
        image = container.get("image", "")
        yield Problem("ImagePullFailing", detail if image in detail else f"{image}: {detail}")
    elif reason == "CreateContainerConfigError" and _MISSING.search(message):
        yield Problem("ConfigMissing", name + message)
    elif reason in _REFUSALS:
        yield Problem("ContainerRefused", name + (message or reason))


def _ended(container: Body, spec: Body) -> Iterator[Problem]:
    """The container's current end, or the last one if it runs or waits again."""
    state = container.get("state") or {}
    end = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    looping = (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff"
    if end is None or container.get("ready") or not (end["exitCode"] or looping):
        return
    name = container["name"]
    if end.get("reason") == "OOMKilled":
        limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
        exceeded = f"its memory limit of {limit}" if limit else "its node's memory"
        yield Problem("OutOfMemory", f"container {name} exceeded {exceeded} and was killed")
        return
    message = f"container {name} ended with {_exit(end)}"
    last_line = _last_line(end.get("message") or "")
    reason = "ModelFetchFailing" if name == FETCH_CONTAINER else "Crashing"
    if end.get("reason") in ("StartError", "ContainerCannotRun"):
        reason, message = "ContainerRefused", f"container {name} did not start"
    elif end["exitCode"] in _CONFIG_ERRORS and last_line:
        reason = reason if name == FETCH_CONTAINER else "ConfigInvalid"
        message = f"container {name}"
    yield Problem(reason, f"{message}: {last_line}" if last_line else message)


def _exit(end: Body) -> str:
    code = end["exitCode"]
    signal = end.get("signal") or (code - 128 if code > 128 else 0)
    return f"exit code {code}" + (f" ({_SIGNALS[signal]})" if signal in _SIGNALS else "")


def _last_line(text: str) -> str:
    """The last line of a termination message, which may be the end of the log. For a JSON log line
    its message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    try:
        record = json.loads(lines[-1])
    except ValueError:
        return lines[-1]
    message = record.get("message") if isinstance(record, dict) else None
    return message if isinstance(message, str) and message else lines[-1]


def _silence(status: Body) -> Iterator[Problem]:
    """Kubernetes' node controller sets the pods of a silent node to not ready without a reason,
    while their containers keep the kubelet's last state: ready."""
    ready = condition(status, "Ready")
    well = _all_ready(status.get("containerStatuses") or ())
    if ready.get("status") == "False" and not ready.get("reason") and well:
        yield Problem(NODE_LOST, "its node no longer reports to Kubernetes")


def _all_ready(containers: Iterable[Body]) -> bool:
    states = [bool(container.get("ready")) for container in containers]
    return bool(states) and all(states)


def _bounded(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 3] + "..."


# "" if the pod fetches no model.
Fetch = Literal["", "waiting", "running", "done"]
# unplaced: not scheduled. pending: not all containers are created. over: it has ended, and its
# controller no longer counts it.
Stage = Literal["unplaced", "pending", "running", "over"]


class ObservedWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment. `instance`: which data server of the store. `pods`: number of pods, of old
    templates too; `updated`: those of the newest template. `current`: the controller has observed
    the newest spec. `problem`: PodsRefused if the controller may not create pods, StartOverdue if
    none became ready within progressDeadlineSeconds; `message` holds the details. `gpus`: GPUs per
    pod. `holds`: routers of the newest template hold requests while there is no node."""

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
        """Whether no pod of an older template is left, except terminating ones."""
        return self.current and self.pods == self.updated


class FirstSeen(msgspec.Struct, frozen=True, kw_only=True):
    """When this operator first saw the pod in its current state, on its own monotonic clock.

    The timestamps in a pod come from other machines' clocks: a kubelet's, the API server's, an
    earlier leader's. They are only shown and compared for equality; durations are measured with
    these fields instead. An operator that restarts measures from its own start.
    """

    created: float = 0.0
    readiness: float = 0.0  # since then it has been ready, or has not
    unprepared: float = 0.0
    drain: float = 0.0


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    """`problem`: why it does not become ready, "" if nothing is wrong; `message` holds the details.
    `unprepared_since`: when the kubelet began to set up volumes, secrets and network, without
    success so far; only events say what is missing. `drain_since`: when it was marked to go, "" if
    it was not; `drain_reason`: why this pod was chosen. In a roll-out `replaced_by` is the new
    revision and `drain_seconds` the time for its requests, else "". `unready_since` is "" while it
    is ready or its readiness is unknown; `ready_since` is "" while it is not ready."""

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
        """Whether it terminates or was marked to go, so that it takes no new requests soon."""
        return self.terminating or bool(self.drain_since)


class ObservedScaler(msgspec.Struct, frozen=True, kw_only=True):
    """A PoolScaler. `wanted` is what an autoscaler wrote; we wrote the other fields."""

    wanted: int
    replicas: int
    selector: str


class ObservedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """An Ingress or HTTPRoute. `accepted` is None while no controller has accepted or rejected
    it."""

    kind: Literal["Ingress", "HTTPRoute"]
    accepted: bool | None
    message: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A child that the API server refused; `message` is the server's. `own_words`: this operator
    refused it."""

    child: ChildKey
    code: int
    message: str
    own_words: bool = False


class SharedHost(msgspec.Struct, frozen=True, kw_only=True):
    """Another pool's route of the same host name. `field` is this pool's."""

    field: str
    host: str
    pool: str


class Departure(msgspec.Struct, frozen=True):
    """What keeps a role's surplus nodes from going, except their requests. `held`: it needs an
    intervention."""

    role: Role
    message: str
    held: bool


class Roll(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a pool's roll-out. `rolling`: nodes of older revisions serve. `no_room`: what
    the GPU budget lacks for it. `short`: roles that the budget gives fewer nodes than desired."""

    rolling: bool = False
    no_room: str = ""
    short: tuple[Role, ...] = ()


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's last decision."""

    mode: PlannedMode
    prefill: int
    decode: int
    reason: str
    message: str
    numbers: str = ""

    def like(self, other: Planned) -> bool:
        """Whether counts and reason are the same."""
        counts, others = (self.prefill, self.decode), (other.prefill, other.decode)
        return counts == others and self.reason == other.reason


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's children at one moment. `nodes` and `fetches` are None if the index was not read
    or did not answer; `silent` if several reads in a row failed. `store_problem`: of an external
    store, at the last read. `address` is that of the router's LoadBalancer, "" without one.
    `planned` is None without autoscaling, or while paused."""

    workloads: tuple[ObservedWorkload, ...] = ()
    pods: tuple[ObservedPod, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    nodes: tuple[NodeReport, ...] | None = None
    fetches: tuple[FetchReport, ...] | None = None
    routes: tuple[ObservedRoute, ...] = ()
    address: str = ""
    silent: bool = False
    store_problem: StoreProblem | None = None
    departures: tuple[Departure, ...] = ()
    roll: Roll = Roll()
    planned: Planned | None = None
    shared_hosts: tuple[SharedHost, ...] = ()

    @property
    def drains(self) -> bool:
        """Whether nodes must go, chosen or not yet."""
        return bool(self.departures) or any(pod.drain_since for pod in self.pods)

    @property
    def held(self) -> bool:
        """Whether nodes must go and cannot."""
        return any(departure.held for departure in self.departures)


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
    refused = condition(status, "ReplicaFailure")
    if refused.get("status") == "True":
        return "PodsRefused", refused.get("message", "")
    if condition(status, "Progressing").get("reason") == "ProgressDeadlineExceeded":
        return "StartOverdue", f"not ready after {spec.get('progressDeadlineSeconds')} s"
    return "", ""


def read_pod(body: Body) -> ObservedPod:
    """Read a pod of ours. A terminating pod has no problem."""
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
    placed = condition(status, "PodScheduled").get("status") == "True"
    prepared = condition(status, "PodReadyToStartContainers")
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
            found = condition(parent, kind)
            if found.get("observedGeneration", newest) < newest:
                continue
            if found.get("status") == "False":
                return False, f"{found.get('reason', kind)}: {found.get('message', '')}"
            accepting += kind == "Accepted" and found.get("status") == "True"
    return (True, "") if accepting >= parents else (None, "")
