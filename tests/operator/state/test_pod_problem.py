"""The problems that keep a pod from being ready."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.state.pod_problem import LONGEST_MESSAGE, unprepared_problem
from baton_operator.state.readers import read_pod
from tests.operator.state.bodies import fetcher
from tests.support.kubernetes import pod_bodies as b
from tests.support.kubernetes.pod_bodies import Body, container, pod, terminated, waiting

PULL_BACK_OFF = f'Back-off pulling image "{b.NODE_IMAGE}": ErrImagePull: {b.NOT_FOUND}'
LOG_LINE = '{"time": 1.5, "level": "error", "logger": "baton", "message": "no such folder: /m"}'
USAGE = "usage: baton [-h] COMMAND ..."
WRONG_FLAG = "baton: error: unrecognized arguments: --limits=/etc/limits.yaml"
NO_CLAIM = '0/1 nodes are available: persistentvolumeclaim "models" not found. not found'
START_FAILED = 'exec: "baton": executable file not found in $PATH'
EVICTED = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 12Mi. "
PROBLEMS: list[tuple[str, Body, str, str]] = [
    ("no GPU is left", b.unplaced(b.UNSCHEDULABLE), "Unschedulable", "2 Insufficient nvidia.com"),
    (
        "a scheduling gate",
        b.unplaced("Scheduling is blocked due to non-empty scheduling gates", "SchedulingGated"),
        "Unschedulable",
        "scheduling gates",
    ),
    ("no claim", b.unplaced(NO_CLAIM), "VolumeMissing", '"models" not found'),
    (
        "an unbound claim",
        b.unplaced("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
        "VolumeMissing",
        "unbound",
    ),
    ("a pull failed", pod(container(waiting("ErrImagePull", b.NOT_FOUND))), "ImagePullFailing", ""),
    (
        "a wrong image name",
        pod(container(waiting("InvalidImageName", "couldn't parse image name: invalid reference"))),
        "ImagePullFailing",
        f"{b.NODE_IMAGE}: couldn't parse",
    ),
    (
        "a Secret is missing",
        pod(container(waiting("CreateContainerConfigError", 'secret "hub-login" not found'))),
        "ConfigMissing",
        'container node: secret "hub-login" not found',
    ),
    (
        "a key is missing",
        pod(
            container(
                waiting("CreateContainerConfigError", "couldn't find key token in Secret team/hub")
            )
        ),
        "ConfigMissing",
        "couldn't find key token",
    ),
    (
        "an image that runs as root",
        pod(
            container(
                waiting(
                    "CreateContainerConfigError",
                    "container has runAsNonRoot and image will run as root",
                )
            )
        ),
        "ContainerRefused",
        "image will run as root",
    ),
    (
        "no such command",
        pod(container(b.LOOPING, terminated(128, "StartError", START_FAILED))),
        "ContainerRefused",
        "did not start: exec",
    ),
    (
        "a crash loop",
        pod(container(b.LOOPING, terminated(1, message="Traceback\n  x\nOSError: no room\n"))),
        "Crashing",
        "container node ended with exit code 1: OSError: no room",
    ),
    (
        "a crash with a JSON log line",
        pod(container(terminated(1, message=f"noise\n{LOG_LINE}"))),
        "Crashing",
        "container node ended with exit code 1: no such folder: /m",
    ),
    (
        "a wrong flag",
        pod(container(b.LOOPING, terminated(2, message=f"{USAGE}\n{WRONG_FLAG}\n"))),
        "ConfigInvalid",
        f"container node: {WRONG_FLAG}",
    ),
    (
        "a wrong flag with a JSON log line",
        pod(container(terminated(2, message=f"noise\n{LOG_LINE}"))),
        "ConfigInvalid",
        "container node: no such folder: /m",
    ),
    (
        "a wrong configuration with the exit code of sysexits.h",
        pod(container(b.RUNNING, terminated(78, message="no such key: /m"))),
        "ConfigInvalid",
        "container node: no such key: /m",
    ),
    (
        "a wrong flag without a message",
        pod(container(b.LOOPING, terminated(2))),
        "Crashing",
        "container node ended with exit code 2",
    ),
    (
        "a fetch with a wrong flag",
        pod(
            container(waiting("PodInitializing")),
            init=(fetcher(b.LOOPING, terminated(2, message=WRONG_FLAG)),),
        ),
        "ModelFetchFailing",
        f"container fetch-model: {WRONG_FLAG}",
    ),
    (
        "a crash without a message",
        pod(container(b.LOOPING, terminated(139))),
        "Crashing",
        "container node ended with exit code 139 (SIGSEGV)",
    ),
    (
        "a server that keeps ending with exit code 0",
        pod(container(b.LOOPING, terminated(0, "Completed"))),
        "Crashing",
        "exit code 0",
    ),
    (
        "running again after a crash",
        pod(container(b.RUNNING, terminated(1, message="boom"))),
        "Crashing",
        "boom",
    ),
    (
        "too much memory",
        pod(container(b.LOOPING, terminated(137, "OOMKilled")), limits={"memory": "512Mi"}),
        "OutOfMemory",
        "container node exceeded its memory limit of 512Mi and was killed",
    ),
    (
        "a fetch that fails",
        pod(
            container(waiting("PodInitializing")),
            init=(fetcher(b.LOOPING, terminated(1, message=b.FETCH_FAILED)),),
        ),
        "ModelFetchFailing",
        "the hub answered 401",
    ),
    (
        "an eviction",
        pod(status={"phase": "Failed", "reason": "Evicted", "message": EVICTED}),
        "Evicted",
        "Evicted: The node was low on resource: memory.",
    ),
    (
        "a lost node",
        pod(
            container(b.RUNNING, ready=True),
            status={"conditions": b.conditions(Ready={}, PodScheduled="True")},
        ),
        "NodeLost",
        "no longer reports",
    ),
]
NO_SECRET = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'
NO_KEY = 'MountVolume.SetUp failed for volume "ca" : references non-existent secret key: ca.crt'
NO_SERVER = 'MountVolume.SetUp failed for volume "model" : mount failed: file models not found'
TIMED_OUT = (
    "Unable to attach or mount volumes: unmounted volumes=[api-keys], unattached volumes=[],"
    " failed to process volumes=[]: timed out waiting for the condition"
)
NO_DISK = 'AttachVolume.Attach failed for volume "pvc-1" : disk is in another zone'
NO_NETWORK = (
    f"Failed to create pod sandbox: failed to setup network for sandbox {'4f' * 32}: no bridge"
)


@pytest.mark.parametrize(
    ("body", "reason", "message"), [row[1:] for row in PROBLEMS], ids=[row[0] for row in PROBLEMS]
)
def test_the_problem_that_keeps_a_pod_from_being_ready_is_found(
    body: Body, reason: str, message: str
) -> None:
    seen = read_pod(body)
    assert (seen.problem, seen.ready) == (reason, False)
    assert message in seen.message
    assert "rpc error" not in seen.message
    assert "back-off" not in seen.message.lower()


@pytest.mark.parametrize(
    "body",
    [
        pod(),
        pod(container(b.CREATING)),
        pod(container(b.RUNNING)),
        pod(container(b.RUNNING, ready=True)),
        pod(container(b.RUNNING, terminated(137, "OOMKilled"), ready=True)),
        pod(container(waiting("PodInitializing")), init=(fetcher(b.RUNNING),)),
        pod(
            container(b.RUNNING),
            init=(fetcher(terminated(0, "Completed"), terminated(1)),),
        ),
        pod(container(terminated(1)), deletionTimestamp=b.THEN),
        {"metadata": {"name": "new"}, "spec": {"containers": [{"name": "node"}]}},
    ],
    ids=[
        "placed",
        "pulling",
        "loading",
        "ready",
        "recovered",
        "fetching",
        "fetched after a failure",
        "ending",
        "just created",
    ],
)
def test_a_pod_that_starts_serves_or_ends_has_no_problem(body: Body) -> None:
    seen = read_pod(body)
    assert (seen.problem, seen.message) == ("", "")


def test_both_reasons_of_a_failing_pull_give_one_message() -> None:
    messages = {
        read_pod(pod(container(waiting(reason, message)))).message
        for reason, message in (
            ("ErrImagePull", b.NOT_FOUND),
            ("ErrImagePull", f"rpc error: code = NotFound desc = {b.NOT_FOUND}"),
            ("ImagePullBackOff", PULL_BACK_OFF),
        )
    }
    assert messages == {b.NOT_FOUND}


def test_a_long_message_is_cut_and_made_one_line() -> None:
    seen = read_pod(pod(container(waiting("CreateContainerError", "no\n\tway " * 1000))))
    assert seen.message.startswith("container node: no way no way")
    assert len(seen.message) == LONGEST_MESSAGE


def warning(reason: str, note: str, second: int = 0, **more: Any) -> Body:
    """Return a Warning of a kubelet, as events.k8s.io shows it."""
    times = {"deprecatedLastTimestamp": f"2026-05-04T10:00:{second:02}Z", "eventTime": None}
    return {"type": "Warning", "reason": reason, "note": note} | times | more


UNPLACED = warning("FailedScheduling", "0/3 nodes are available", 59)


@pytest.mark.parametrize(
    ("events", "reason", "message"),
    [
        ([warning("FailedMount", NO_SECRET)], "ConfigMissing", f"FailedMount: {NO_SECRET}"),
        ([warning("FailedMount", NO_KEY)], "ConfigMissing", f"FailedMount: {NO_KEY}"),
        ([warning("FailedMount", NO_SERVER)], "NotPrepared", f"FailedMount: {NO_SERVER}"),
        (
            [warning("FailedMount", NO_SECRET, 1), warning("FailedMount", TIMED_OUT, 9)],
            "ConfigMissing",
            f"FailedMount: {NO_SECRET}",
        ),
        ([warning("FailedMount", TIMED_OUT)], "NotPrepared", f"FailedMount: {TIMED_OUT}"),
        (
            [warning("FailedMount", NO_SECRET, 1), warning("FailedAttachVolume", NO_DISK, 2)],
            "NotPrepared",
            f"FailedAttachVolume: {NO_DISK}",
        ),
        (
            [warning("FailedCreatePodSandBox", NO_NETWORK)],
            "NotPrepared",
            "FailedCreatePodSandBox: Failed to create pod sandbox: failed to setup network for"
            " sandbox: no bridge",
        ),
        (
            [
                warning("FailedMount", NO_SECRET, 30),
                warning(
                    "NetworkNotReady",
                    "no CNI",
                    deprecatedLastTimestamp=None,
                    eventTime="2026-05-04T10:00:01.000000Z",
                    series={"count": 4, "lastObservedTime": "2026-05-04T10:00:40.000000Z"},
                ),
            ],
            "NotPrepared",
            "NetworkNotReady: no CNI",
        ),
        ([UNPLACED, warning("FailedMount", NO_KEY)], "ConfigMissing", f"FailedMount: {NO_KEY}"),
    ],
    ids=[
        "no Secret",
        "no key in it",
        "a file is missing",
        "a cause is preferred to a newer timeout",
        "only a timeout",
        "the newest event",
        "the id of a sandbox is left out",
        "a repeated event counts at its last time",
        "a scheduling event is ignored",
    ],
)
def test_events_explain_why_a_pod_is_not_prepared(
    events: list[Body], reason: str, message: str
) -> None:
    found = unprepared_problem(events)
    assert found is not None
    assert (found.reason, found.message) == (reason, message)


def test_without_a_suitable_event_a_pod_has_no_preparation_problem() -> None:
    assert unprepared_problem([]) is None
    assert unprepared_problem([UNPLACED]) is None


@pytest.mark.parametrize(
    ("reason", "note"),
    [
        ("Unhealthy", "Startup probe failed: connect: connection refused"),
        ("Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503"),
        ("BackOff", "Back-off restarting failed container node in pod demo"),
        ("Failed", "Error: secret not found"),
    ],
)
def test_an_event_of_a_container_says_nothing_about_the_pod_s_preparation(
    reason: str, note: str
) -> None:
    """The pod is prepared, and its status is late."""
    of_container = {"kind": "Pod", "fieldPath": "spec.containers{node}"}
    assert unprepared_problem([{"reason": reason, "note": note, "regarding": of_container}]) is None
