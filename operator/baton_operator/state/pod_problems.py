"""Why a pod does not get ready, from what scheduler and kubelet wrote into its status.

In: a pod as the API gives it. Out: the first `Problem`, in the order in which a pod comes to life,
or None while nothing is wrong: a pod that pulls its image or loads its model has no problem.

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
from typing import Any

import msgspec

from baton_operator.names import FETCH_CONTAINER

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
# Each try to make a pod's sandbox has an id of its own.
_SANDBOX_ID = re.compile(r' "?[0-9a-f]{64}"?')
# Says less than what it waited for, which another event has said.
_TIMED_OUT = re.compile(r"timed out waiting for the condition|context deadline exceeded")
# A wrong command line, as our commands, argparse and shells say it, and sysexits.h's EX_USAGE and
# EX_CONFIG.
_CONFIG_ERRORS = frozenset({2, 64, 78})
_SIGNALS = {9: "SIGKILL", 6: "SIGABRT", 11: "SIGSEGV", 15: "SIGTERM"}


class Problem(msgspec.Struct, frozen=True):
    reason: str
    message: str


def condition(status: Body, kind: str) -> Body:
    """The condition of that type; an empty one where there is none."""
    found = (item for item in status.get("conditions") or () if item["type"] == kind)
    return next(found, {})


def problem_of(pod: Body) -> Problem | None:
    """Of a pod that is not ending."""
    status = pod.get("status") or {}
    if condition(status, "Ready").get("status") == "True":
        return None
    found = next(_problems(pod, status), None)
    return Problem(found.reason, _bounded(found.message)) if found else None


def unprepared_problem(events: Iterable[Body]) -> Problem | None:
    """Of a pod that is placed and not prepared, from its Warnings as events.k8s.io has them."""
    told = [event for event in events if event.get("reason") != "FailedScheduling"]
    newest = max(told, key=_weight, default=None)
    if newest is None:
        return None
    note = _SANDBOX_ID.sub("", newest.get("note") or "")
    reason = "ConfigMissing" if _MISSING_VOLUME.search(note) else "NotPrepared"
    return Problem(reason, _bounded(f"{newest.get('reason') or 'Failed'}: {note}"))


def _weight(event: Body) -> tuple[bool, str]:
    """What says most, then what was said last."""
    moments = (
        (event.get("series") or {}).get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
    )
    last = max((moment for moment in moments if moment), default="")
    return not _TIMED_OUT.search(event.get("note") or ""), last


def _problems(pod: Body, status: Body) -> Iterator[Problem]:
    if status.get("phase") == "Failed":
        words = [status.get("reason") or "Failed", status.get("message") or ""]
        yield Problem("Evicted", ": ".join(word for word in words if word))
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
        words = _PULL_NOISE.sub("", message) or reason
        image = container.get("image", "")
        yield Problem("ImagePullFailing", words if image in words else f"{image}: {words}")
    elif reason == "CreateContainerConfigError" and _MISSING.search(message):
        yield Problem("ConfigMissing", name + message)
    elif reason in _REFUSALS:
        yield Problem("ContainerRefused", name + (message or reason))


def _ended(container: Body, spec: Body) -> Iterator[Problem]:
    """Now or, where it runs or waits again, the last time."""
    state = container.get("state") or {}
    end = state.get("terminated") or (container.get("lastState") or {}).get("terminated")
    looping = (state.get("waiting") or {}).get("reason") == "CrashLoopBackOff"
    if end is None or container.get("ready") or not (end["exitCode"] or looping):
        return
    name = container["name"]
    if end.get("reason") == "OOMKilled":
        limit = ((spec.get("resources") or {}).get("limits") or {}).get("memory")
        beyond = f"its memory limit of {limit}" if limit else "its node's memory"
        yield Problem("OutOfMemory", f"container {name} was killed beyond {beyond}")
        return
    what = f"container {name} ended with {_exit(end)}"
    last = _last_words(end.get("message") or "")
    reason = "ModelFetchFailing" if name == FETCH_CONTAINER else "Crashing"
    if end.get("reason") in ("StartError", "ContainerCannotRun"):
        reason, what = "ContainerRefused", f"container {name} did not start"
    elif end["exitCode"] in _CONFIG_ERRORS and last:
        reason = reason if name == FETCH_CONTAINER else "ConfigInvalid"
        what = f"container {name}"
    yield Problem(reason, f"{what}: {last}" if last else what)


def _exit(end: Body) -> str:
    code = end["exitCode"]
    signal = end.get("signal") or (code - 128 if code > 128 else 0)
    return f"exit code {code}" + (f" ({_SIGNALS[signal]})" if signal in _SIGNALS else "")


def _last_words(message: str) -> str:
    """The last line of a termination message, which may be the end of the log; of a log line in
    JSON its message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if not lines:
        return ""
    try:
        record = json.loads(lines[-1])
    except ValueError:
        return lines[-1]
    said = record.get("message") if isinstance(record, dict) else None
    return said if isinstance(said, str) and said else lines[-1]


def _silence(status: Body) -> Iterator[Problem]:
    """Kubernetes' node controller takes the pods of a silent node out of service, and says no
    reason, while their containers are as the kubelet last saw them: ready."""
    ready = condition(status, "Ready")
    well = _all_ready(status.get("containerStatuses") or ())
    if ready.get("status") == "False" and not ready.get("reason") and well:
        yield Problem(NODE_LOST, "its node does not answer Kubernetes any more")


def _all_ready(containers: Iterable[Body]) -> bool:
    states = [bool(container.get("ready")) for container in containers]
    return bool(states) and all(states)


def _bounded(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= LONGEST_MESSAGE else line[: LONGEST_MESSAGE - 3] + "..."
