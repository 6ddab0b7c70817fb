"""What real schedulers, kubelets and controllers write when a pod fails is what we read in it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import pytest

from baton_operator.state.observed import ObservedPod, read_pod, read_workload, unprepared_problem
from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.images import SIM_IMAGE
from tests.support.needs import needs

T = TypeVar("T")
WAIT_S = 240.0
NOWHERE = "registry.invalid/baton:1"
CRASH = "import sys, time; time.sleep(1); sys.exit('looking\\nno such folder: /models/x')"
LOGIN = {"name": "hub-login", "key": "token"}
# Memory that nobody writes to is no memory.
GREEDY = "x = b'x' * (1 << 30)"


def pod(name: str, code: str = "", **container: Any) -> dict[str, Any]:
    """One container that runs Python."""
    facts: dict[str, Any] = {
        "name": "node",
        "image": SIM_IMAGE,
        "imagePullPolicy": "Never",
        "command": ["python", "-c", code],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"baton.dev/component": "decode"}},
        "spec": {"terminationGracePeriodSeconds": 0, "containers": [facts | container]},
    }


def fetching_pod(name: str, code: str) -> dict[str, Any]:
    body = pod(name)
    [first] = pod(name, code)["spec"]["containers"]
    body["spec"]["initContainers"] = [first | {"name": "fetch-model"}]
    return body


def until(what: str, look: Callable[[], T], good: Callable[[T], object]) -> T:
    end = time.monotonic() + WAIT_S
    while not good(seen := look()):
        assert time.monotonic() < end, f"{what}: {seen}"
        time.sleep(0.2)
    return seen


def get(cluster: Kubernetes, namespace: str, kind: str, name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(
        cluster.kubectl("get", kind, name, "-n", namespace, "-o", "json")
    )
    return body


def watch_pod(
    cluster: Kubernetes, namespace: str, body: dict[str, Any], good: Callable[[ObservedPod], object]
) -> ObservedPod:
    """Create it; what it looks like once `good` says so."""
    name = body["metadata"]["name"]
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))
    return until(name, lambda: read_pod(get(cluster, namespace, "pod", name)), good)


def problem_of(cluster: Kubernetes, namespace: str, body: dict[str, Any]) -> tuple[str, str]:
    seen = watch_pod(cluster, namespace, body, lambda seen: seen.problem)
    return seen.problem, seen.message


class Row(NamedTuple):
    """What a pod lacks, by the pod's name; the problem that we read; all of its message."""

    body: dict[str, Any]
    reason: str
    message: str


def volume_pod(name: str, volume: dict[str, Any]) -> dict[str, Any]:
    body = pod(name)
    body["spec"]["volumes"] = [{"name": "m", **volume}]
    return body


ROWS = (
    Row(
        pod("image-that-cannot-be-pulled", image=NOWHERE, imagePullPolicy="IfNotPresent"),
        "ImagePullFailing",
        rf".*{re.escape(NOWHERE)}.*",
    ),
    Row(pod("image-never-pulled", image=NOWHERE), "ImagePullFailing", rf".*{re.escape(NOWHERE)}.*"),
    Row(
        pod("gpu-that-nobody-has", resources={"limits": {"nvidia.com/gpu": "64"}}),
        "Unschedulable",
        r".*Insufficient nvidia\.com/gpu.*",
    ),
    Row(
        volume_pod("missing-claim", {"persistentVolumeClaim": {"claimName": "models"}}),
        "VolumeMissing",
        r'.*"models" not found.*',
    ),
    Row(
        pod("missing-secret", env=[{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": LOGIN}}]),
        "ConfigMissing",
        r'.*"hub-login" not found.*',
    ),
    Row(
        pod("missing-command", command=["no-such-program"]),
        "ContainerRefused",
        ".*no-such-program.*",
    ),
    Row(
        pod("root-user", securityContext={"runAsNonRoot": True, "runAsUser": 0}),
        "ContainerRefused",
        ".*root.*",
    ),
    Row(
        pod("refused-flag", command=["baton", "router", "--no-such-flag"]),
        "ConfigInvalid",
        "container node: baton.*--no-such-flag.*",
    ),
    Row(
        pod("too-much-memory", GREEDY, resources={"limits": {"memory": "64Mi"}}),
        "OutOfMemory",
        "container node exceeded its memory limit of 64Mi and was killed",
    ),
    Row(
        fetching_pod("failing-fetch", "import sys; sys.exit('the hub answered 401')"),
        "ModelFetchFailing",
        "container fetch-model ended with exit code 1: the hub answered 401",
    ),
)


@pytest.fixture(scope="module")
def failing(cluster: Kubernetes) -> Iterator[str]:
    """The namespace of all rows' pods, which fail beside each other."""
    namespace = cluster.new_namespace()
    pods = {"apiVersion": "v1", "kind": "List", "items": [row.body for row in ROWS]}
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(pods))
    yield namespace
    cluster.delete_namespace(namespace)


@pytest.mark.parametrize("row", ROWS, ids=[row.body["metadata"]["name"] for row in ROWS])
def test_what_a_pod_lacks_is_read_from_its_status(
    cluster: Kubernetes, failing: str, row: Row
) -> None:
    name = row.body["metadata"]["name"]
    seen = until(
        name,
        lambda: read_pod(get(cluster, failing, "pod", name)),
        lambda seen: seen.problem,
    )
    assert seen.problem == row.reason
    assert re.fullmatch(row.message, seen.message, re.DOTALL), seen.message


def test_a_secret_that_a_volume_lacks_is_told_by_events_alone(
    cluster: Kubernetes, pod_namespace: str
) -> None:
    # The kubelet prepares only what a container mounts.
    body = pod("mount", volumeMounts=[{"name": "ca", "mountPath": "/ca"}])
    body["spec"]["volumes"] = [{"name": "ca", "secret": {"secretName": "redis-ca"}}]
    first = watch_pod(cluster, pod_namespace, body, lambda seen: seen.unprepared_since)
    told = {"type": "Warning", "regarding.kind": "Pod", "regarding.name": "mount"}
    selector = ",".join(f"{key}={value}" for key, value in told.items())
    words = ("get", "events.events.k8s.io", "-n", pod_namespace, f"--field-selector={selector}")
    said = until(
        "what the kubelet says",
        lambda: unprepared_problem(json.loads(cluster.kubectl(*words, "-o", "json"))["items"]),
        lambda problem: problem,
    )
    assert said is not None
    assert said.reason == "ConfigMissing"
    assert said.message.startswith("FailedMount: ")
    assert 'secret "redis-ca" not found' in said.message
    seen = read_pod(get(cluster, pod_namespace, "pod", "mount"))
    assert (seen.problem, seen.stage) == ("", "pending")
    assert seen.unprepared_since == first.unprepared_since


def test_a_crash_loop_stays_one_problem_with_the_last_words(
    cluster: Kubernetes, pod_namespace: str
) -> None:
    # Without a probe it would be ready for a moment each time.
    body = pod("crash", CRASH, readinessProbe={"tcpSocket": {"port": 1}, "periodSeconds": 1})
    expected = "Crashing", "container node ended with exit code 1: no such folder: /models/x"
    assert problem_of(cluster, pod_namespace, body) == expected

    def restarts(live: dict[str, Any]) -> int:
        assert (read_pod(live).problem, read_pod(live).message) == expected
        count: int = live["status"]["containerStatuses"][0]["restartCount"]
        return count

    until(
        "two restarts",
        lambda: restarts(get(cluster, pod_namespace, "pod", "crash")),
        lambda count: count >= 2,
    )


def test_a_fetch_is_seen_while_it_runs_and_when_it_is_done(
    cluster: Kubernetes, pod_namespace: str
) -> None:
    code = "import os, time\nwhile not os.path.exists('/tmp/fetched'): time.sleep(0.1)"
    body = fetching_pod("slow", code)
    body["spec"]["containers"][0]["command"] = ["python", "-c", "import time; time.sleep(600)"]
    running = watch_pod(cluster, pod_namespace, body, lambda seen: seen.fetch == "running")
    assert (running.problem, running.ready) == ("", False)
    fetched = ("--container=fetch-model", "--", "python", "-c", "open('/tmp/fetched', 'w')")
    cluster.kubectl("exec", "slow", "-n", pod_namespace, *fetched)
    done = watch_pod(cluster, pod_namespace, body, lambda seen: seen.ready)
    assert (done.fetch, done.problem) == ("done", "")


def test_a_quota_that_lets_no_pod_be_made(cluster: Kubernetes, pod_namespace: str) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }
    labels, template = {"baton.dev/component": "decode"}, pod("x")
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "d", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
        },
    }
    for body in (quota, deployment):
        cluster.kubectl("apply", "-n", pod_namespace, "-f", "-", stdin=json.dumps(body))
        # Before its controller has counted, pods are refused with other words.
        counted = "--for=jsonpath={.status.hard.pods}=0"
        cluster.kubectl("wait", counted, "quota/none", "-n", pod_namespace, "--timeout=180s")
    seen = until(
        "the Deployment",
        lambda: read_workload(get(cluster, pod_namespace, "deployment", "d")),
        lambda seen: seen.problem,
    )
    assert seen.problem == "PodsRefused"
    assert "exceeded quota: none" in seen.message
    assert (seen.desired, seen.pods, seen.ready) == (1, 0, 0)


def test_a_node_that_falls_silent(cluster: Kubernetes, pod_namespace: str) -> None:
    needs("own_cluster")
    body = pod("lost", "import time; time.sleep(600)")
    body["spec"]["nodeName"] = doomed = cluster.nodes[-1]
    watch_pod(cluster, pod_namespace, body, lambda seen: seen.ready)
    cluster.kill_node(doomed)
    try:
        reason, _ = problem_of(cluster, pod_namespace, body)
        assert reason == "NodeLost"
    finally:
        cluster.start_node(doomed)
