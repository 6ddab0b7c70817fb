"""The operator reads the right problem from the statuses that a real cluster writes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import pytest

from baton_operator.state.observed import ObservedPod
from baton_operator.state.pod_problem import unprepared_problem
from baton_operator.state.readers import read_pod, read_workload
from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.images import SIM_IMAGE
from tests.support.needs import needs

T = TypeVar("T")
WAIT_S = 240.0
UNREACHABLE_IMAGE = "registry.invalid/baton:1"
CRASH = "import sys, time; time.sleep(1); sys.exit('looking\\nno such folder: /models/x')"
LOGIN = {"name": "hub-login", "key": "token"}
# Memory counts against the limit only once it is written.
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


def wait_for(what: str, read: Callable[[], T], accept: Callable[[T], object]) -> T:
    end = time.monotonic() + WAIT_S
    while not accept(observed := read()):
        assert time.monotonic() < end, f"{what}: {observed}"
        time.sleep(0.2)
    return observed


def get(cluster: Kubernetes, namespace: str, kind: str, name: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(
        cluster.kubectl("get", kind, name, "-n", namespace, "-o", "json")
    )
    return body


def watch_pod(
    cluster: Kubernetes,
    namespace: str,
    body: dict[str, Any],
    accept: Callable[[ObservedPod], object],
) -> ObservedPod:
    """Apply the pod, and return its observed state once `accept` holds for it."""
    name = body["metadata"]["name"]
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))
    return wait_for(name, lambda: read_pod(get(cluster, namespace, "pod", name)), accept)


def problem_of(cluster: Kubernetes, namespace: str, body: dict[str, Any]) -> tuple[str, str]:
    observed = watch_pod(cluster, namespace, body, lambda observed: observed.problem)
    return observed.problem, observed.message


class FailingPod(NamedTuple):
    """A failing pod, and the expected problem and message (a regular expression)."""

    body: dict[str, Any]
    reason: str
    message: str


def volume_pod(name: str, volume: dict[str, Any]) -> dict[str, Any]:
    body = pod(name)
    body["spec"]["volumes"] = [{"name": "m", **volume}]
    return body


FAILING_PODS = (
    FailingPod(
        pod("image-that-cannot-be-pulled", image=UNREACHABLE_IMAGE, imagePullPolicy="IfNotPresent"),
        "ImagePullFailing",
        rf".*{re.escape(UNREACHABLE_IMAGE)}.*",
    ),
    FailingPod(
        pod("image-never-pulled", image=UNREACHABLE_IMAGE),
        "ImagePullFailing",
        rf".*{re.escape(UNREACHABLE_IMAGE)}.*",
    ),
    FailingPod(
        pod("too-many-gpus", resources={"limits": {"nvidia.com/gpu": "64"}}),
        "Unschedulable",
        r".*Insufficient nvidia\.com/gpu.*",
    ),
    FailingPod(
        volume_pod("missing-claim", {"persistentVolumeClaim": {"claimName": "models"}}),
        "VolumeMissing",
        r'.*"models" not found.*',
    ),
    FailingPod(
        pod("missing-secret", env=[{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": LOGIN}}]),
        "ConfigMissing",
        r'.*"hub-login" not found.*',
    ),
    FailingPod(
        pod("missing-command", command=["no-such-program"]),
        "ContainerRefused",
        ".*no-such-program.*",
    ),
    FailingPod(
        pod("root-user", securityContext={"runAsNonRoot": True, "runAsUser": 0}),
        "ContainerRefused",
        ".*root.*",
    ),
    FailingPod(
        pod("refused-flag", command=["baton", "router", "--no-such-flag"]),
        "ConfigInvalid",
        "container node: baton.*--no-such-flag.*",
    ),
    FailingPod(
        pod("missing-model", command=["baton", "prefill", "--engine=sim", "--model=/models/none"]),
        "ConfigInvalid",
        "container node: baton: --model /models/none: the folder does not exist",
    ),
    FailingPod(
        pod(
            "too-little-kv-memory", command=["baton", "decode", "--engine=sim", "--kv-memory=1KiB"]
        ),
        "ConfigInvalid",
        "container node: baton: .*--kv-memory is 1024 bytes; .*",
    ),
    FailingPod(
        pod(
            "broken-keys",
            command=["baton", "router", "--nodes=http://127.0.0.1:1", "--api-keys=/etc/hostname"],
        ),
        "ConfigInvalid",
        "container node: baton: router: --api-keys /etc/hostname, line 1: .*",
    ),
    FailingPod(
        pod("too-much-memory", GREEDY, resources={"limits": {"memory": "64Mi"}}),
        "OutOfMemory",
        "container node exceeded its memory limit of 64Mi and was killed",
    ),
    FailingPod(
        fetching_pod("failing-fetch", "import sys; sys.exit('the hub answered 401')"),
        "ModelFetchFailing",
        "container fetch-model ended with exit code 1: the hub answered 401",
    ),
)


@pytest.fixture(scope="module")
def failing(cluster: Kubernetes) -> Iterator[str]:
    """The namespace with the pods of all cases, which fail at the same time."""
    namespace = cluster.new_namespace()
    pods = {"apiVersion": "v1", "kind": "List", "items": [case.body for case in FAILING_PODS]}
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(pods))
    yield namespace
    cluster.delete_namespace(namespace)


@pytest.mark.parametrize(
    "case", FAILING_PODS, ids=[case.body["metadata"]["name"] for case in FAILING_PODS]
)
def test_a_pod_s_problem_is_read_from_its_status(
    cluster: Kubernetes, failing: str, case: FailingPod
) -> None:
    name = case.body["metadata"]["name"]
    observed = wait_for(
        name,
        lambda: read_pod(get(cluster, failing, "pod", name)),
        lambda observed: observed.problem,
    )
    assert observed.problem == case.reason
    assert re.fullmatch(case.message, observed.message, re.DOTALL), observed.message


def test_a_secret_that_a_volume_lacks_is_read_from_events(
    cluster: Kubernetes, pod_namespace: str
) -> None:
    # The kubelet prepares only what a container mounts.
    body = pod("mount", volumeMounts=[{"name": "ca", "mountPath": "/ca"}])
    body["spec"]["volumes"] = [{"name": "ca", "secret": {"secretName": "redis-ca"}}]
    first = watch_pod(cluster, pod_namespace, body, lambda observed: observed.unprepared_since)
    filters = {"type": "Warning", "regarding.kind": "Pod", "regarding.name": "mount"}
    selector = ",".join(f"{key}={value}" for key, value in filters.items())
    args = ("get", "events.events.k8s.io", "-n", pod_namespace, f"--field-selector={selector}")
    problem = wait_for(
        "the kubelet's event",
        lambda: unprepared_problem(json.loads(cluster.kubectl(*args, "-o", "json"))["items"]),
        lambda problem: problem,
    )
    assert problem is not None
    assert problem.reason == "ConfigMissing"
    assert problem.message.startswith("FailedMount: ")
    assert 'secret "redis-ca" not found' in problem.message
    observed = read_pod(get(cluster, pod_namespace, "pod", "mount"))
    assert (observed.problem, observed.stage) == ("", "pending")
    assert observed.unprepared_since == first.unprepared_since


def test_a_crash_loop_keeps_one_problem_with_the_last_log_line(
    cluster: Kubernetes, pod_namespace: str
) -> None:
    # Without a probe the pod would be ready for a moment at each start.
    body = pod("crash", CRASH, readinessProbe={"tcpSocket": {"port": 1}, "periodSeconds": 1})
    expected = "Crashing", "container node ended with exit code 1: no such folder: /models/x"
    assert problem_of(cluster, pod_namespace, body) == expected

    def restarts(live: dict[str, Any]) -> int:
        assert (read_pod(live).problem, read_pod(live).message) == expected
        count: int = live["status"]["containerStatuses"][0]["restartCount"]
        return count

    wait_for(
        "two restarts",
        lambda: restarts(get(cluster, pod_namespace, "pod", "crash")),
        lambda count: count >= 2,
    )


def test_a_fetch_is_observed_while_it_runs_and_when_it_is_done(
    cluster: Kubernetes, pod_namespace: str
) -> None:
    code = "import os, time\nwhile not os.path.exists('/tmp/fetched'): time.sleep(0.1)"
    body = fetching_pod("slow", code)
    body["spec"]["containers"][0]["command"] = ["python", "-c", "import time; time.sleep(600)"]
    running = watch_pod(cluster, pod_namespace, body, lambda observed: observed.fetch == "running")
    assert (running.problem, running.ready) == ("", False)
    fetched = ("--container=fetch-model", "--", "python", "-c", "open('/tmp/fetched', 'w')")
    cluster.kubectl("exec", "slow", "-n", pod_namespace, *fetched)
    done = watch_pod(cluster, pod_namespace, body, lambda observed: observed.ready)
    assert (done.fetch, done.problem) == ("done", "")


def test_a_quota_without_pods_is_the_problem_pods_refused(
    cluster: Kubernetes, pod_namespace: str
) -> None:
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
        # Before the quota's controller has counted, pods are refused with another message.
        counted = "--for=jsonpath={.status.hard.pods}=0"
        cluster.kubectl("wait", counted, "quota/none", "-n", pod_namespace, "--timeout=180s")
    observed = wait_for(
        "the Deployment",
        lambda: read_workload(get(cluster, pod_namespace, "deployment", "d")),
        lambda observed: observed.problem,
    )
    assert observed.problem == "PodsRefused"
    assert "exceeded quota: none" in observed.message
    assert (observed.desired, observed.pods, observed.ready) == (1, 0, 0)


def test_a_pod_on_a_silent_node_has_the_problem_node_lost(
    cluster: Kubernetes, pod_namespace: str
) -> None:
    needs("own_cluster")
    body = pod("lost", "import time; time.sleep(600)")
    body["spec"]["nodeName"] = doomed = cluster.nodes[-1]
    watch_pod(cluster, pod_namespace, body, lambda observed: observed.ready)
    cluster.kill_node(doomed)
    try:
        reason, _ = problem_of(cluster, pod_namespace, body)
        assert reason == "NodeLost"
    finally:
        cluster.start_node(doomed)
