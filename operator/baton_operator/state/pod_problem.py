"""Why a pod does not become ready, from what scheduler and kubelet wrote into its status. Pure.

In: a pod as the API returns it, or its Warning events. Out: the first `Problem`, in the order of a
pod's start, or None if nothing is wrong. A pod that pulls its image or loads its model has no
problem.

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
from collections.abc import Iterable, Iterator

import msgspec

from baton_operator.kube.objects import Body, find_condition
from baton_operator.names import FETCH_CONTAINER

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


def problem_of(pod: Body) -> Problem | None:
    """The problem of a pod that is not terminating."""
    status = pod.get("status") or {}
    if find_condition(status, "Ready").get("status") == "True":
        return None
    problem = next(_problems(pod, status), None)
    return Problem(problem.reason, _bounded(problem.message)) if problem else None


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
    yield from _placement(find_condition(status, "PodScheduled"))
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
    ready = find_condition(status, "Ready")
    well = _all_ready(status.get("containerStatuses") or ())
    if ready.get("status") == "False" and not ready.get("reason") and well:
        yield Problem(NODE_LOST, "its node no longer reports to Kubernetes")


def _all_ready(containers: Iterable[Body]) -> bool:
    states = [bool(container.get("ready")) for container in containers]
    return bool(states) and all(states)


def _bounded(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 3] + "..."
