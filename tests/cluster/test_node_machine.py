"""The cluster's nodes are real: pods behave as Kubernetes guarantees."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.images import REDIS_IMAGE
from tests.cluster.machine.pods import Manifest, deployment, pod, pod_spec
from tests.cluster.machine.torch_pods import torch_pod_overrides
from tests.support.needs import needs

WAIT_S = 180.0
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
SERVER = """
import http.server
class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")
http.server.ThreadingHTTPServer(("", 8080), Hello).serve_forever()
"""
ENDS_SLOWLY = """
import signal, sys, time
def end(*_):
    print("got SIGTERM", flush=True)
    time.sleep(2)
    print("ended by itself", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("runs", flush=True)
signal.pause()
"""


def python(script: str, *args: str, **container: Any) -> Manifest:
    return pod_spec("python3", "-c", script, *args, **container)


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.2)


class Pods:
    """One namespace of a cluster."""

    def __init__(self, cluster: Kubernetes, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl(*args, "-n", self.namespace, stdin=stdin)

    def apply(self, *manifests: Manifest) -> None:
        whole = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(whole))

    def get(self, kind: str, name: str) -> Manifest:
        found: Manifest = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def wait(self, condition: str, what: str) -> None:
        self.kubectl("wait", f"--for={condition}", what, f"--timeout={WAIT_S:g}s")

    def output(self, name: str, spec: Manifest, **more: Any) -> str:
        """Run a pod to its end, and return its log."""
        self.apply(pod(name, spec, **more))
        until(
            lambda: self.get("pod", name)["status"]["phase"] in {"Succeeded", "Failed"},
            f"the end of {name}",
        )
        return self.kubectl("logs", name)


@pytest.fixture
def pods(cluster: Kubernetes, pod_namespace: str) -> Pods:
    cluster.kubectl(
        "label", "namespace", pod_namespace, *(f"{k}={v}" for k, v in RESTRICTED.items())
    )
    return Pods(cluster, pod_namespace)


@pytest.fixture(scope="module")
def web(cluster: Kubernetes) -> Iterator[Pods]:
    """A web server on each node, behind the service `web`."""
    web_pods = Pods(cluster, cluster.new_namespace(**RESTRICTED))
    probe = {"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1}
    spec = python(SERVER, readinessProbe=probe)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "web"}},
    }
    web_pods.apply(deployment("web", {**spec, "topologySpreadConstraints": [spread]}, replicas=2))
    web_pods.kubectl("expose", "deployment", "web", "--port=80", "--target-port=8080")
    try:
        web_pods.wait("jsonpath={.status.readyReplicas}=2", "deployment/web")
        yield web_pods
    finally:
        cluster.delete_namespace(web_pods.namespace)


def test_a_service_can_be_reached_from_this_machine(web: Pods) -> None:
    with web.cluster.reach(web.namespace, "web", 80) as url:
        until(lambda: answers(url), "an answer of the service")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return bool(answer.read() == b"hello")
    except OSError:
        return False


def test_a_pod_reaches_a_service_by_its_name(web: Pods, pods: Pods) -> None:
    script = f"""
import urllib.request
print(urllib.request.urlopen("http://web.{web.namespace}", timeout=120).read())
"""
    assert pods.output("asks", python(script)) == "b'hello'\n"


def test_a_pod_can_reach_no_other_network(pods: Pods) -> None:
    needs("own_cluster")
    script = """
import errno, socket
for target in ("198.51.100.1", "host.example"):
    try:
        socket.create_connection((target, 80), timeout=120)
    except socket.gaierror:
        print("no such name")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
    assert pods.output("leaves", python(script)) == "ENETUNREACH\nno such name\n"


def test_the_image_runs_baton_without_torch(pods: Pods) -> None:
    find = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('pytest'))"
    # Use one stream, because a pod's log does not keep the order of stdout and stderr.
    shell = f'exec 2>&1; baton --help | head -n 1; id -u; python3 -c "{find}"; : > /new'
    lines = pods.output("baton", pod_spec("sh", "-c", shell)).splitlines()
    assert "baton" in lines[0]
    assert lines[1:3] == ["65532", "None None"]
    assert "Read-only file system" in lines[3]


def test_a_pod_with_the_checkout_s_environment_can_import_torch(
    cluster: Kubernetes, pod_namespace: str, tiny_model: Callable[[str], Path]
) -> None:
    needs("own_cluster")  # the folders are this machine's
    model = tiny_model("llama-gqa1")
    shell = f"""
baton --help > /dev/null && head -c 1 {model}/config.json
python3 -c 'import baton_cli, torch; print(torch.ones(2).sum().item())'
"""
    spec = pod_spec("sh", "-c", shell, name="node")
    overrides = torch_pod_overrides(model)["spec"]
    spec["containers"][0] |= overrides["containers"][0]
    spec["volumes"] = overrides["volumes"]
    assert Pods(cluster, pod_namespace).output("torch", spec) == "{2.0\n"


def test_the_redis_image_serves(pods: Pods) -> None:
    shell = """
redis-server --port 6379 --save "" --daemonize no > /dev/null &
for _ in 1 2 3 4 5 6 7 8 9 10; do for _ in 1 2 3 4 5 6 7 8 9 10; do
    redis-cli ping && exit 0; sleep 1
done; done 2>/dev/null
"""
    assert pods.output("redis", pod_spec("sh", "-c", shell, image=REDIS_IMAGE)) == "PONG\n"


def test_a_container_beyond_its_memory_limit_is_killed(pods: Pods) -> None:
    limits = {"limits": {"memory": "64Mi"}}
    pods.output("greedy", python("b'x' * (512 << 20)", resources=limits))
    state = pods.get("pod", "greedy")["status"]["containerStatuses"][0]["state"]
    assert (state["terminated"]["reason"], state["terminated"]["exitCode"]) == ("OOMKilled", 137)


def test_a_deleted_pod_gets_sigterm_and_time_to_end(pods: Pods) -> None:
    pods.apply(pod("slow", python(ENDS_SLOWLY), terminationGracePeriodSeconds=60))
    pods.wait("condition=Ready", "pod/slow")
    until(lambda: "runs" in pods.kubectl("logs", "slow"), "the first line of the pod")
    with pods.cluster.following("logs", "--follow", "slow", "-n", pods.namespace) as log:
        until(lambda: log == ["runs"], "the first line of the log")
        pods.kubectl("delete", "pod", "slow")
        until(lambda: log == ["runs", "got SIGTERM", "ended by itself"], "the last lines")


@pytest.fixture
def two_gpus(cluster: Kubernetes) -> Iterator[str]:
    """The name of a node that reports two GPUs."""
    name = cluster.nodes[-1]
    cluster.set_gpus(name, 2)
    try:
        yield name
    finally:
        cluster.set_gpus(name, 0)


def test_pods_get_only_as_many_gpus_as_their_node_reports(two_gpus: str, pods: Pods) -> None:
    limits = {"limits": {"nvidia.com/gpu": "2"}}
    pods.apply(pod("has", python("import time; time.sleep(600)", resources=limits)))
    pods.wait("condition=Ready", "pod/has")
    assert pods.get("pod", "has")["spec"]["nodeName"] == two_gpus
    pods.apply(pod("waits", python("", resources=limits)))
    pods.wait("condition=PodScheduled=false", "pod/waits")
    conditions = pods.get("pod", "waits")["status"]["conditions"]
    assert "Insufficient nvidia.com/gpu" in conditions[0]["message"]
    pods.kubectl("delete", "pod", "has", "--grace-period=1")
    pods.wait("condition=PodScheduled", "pod/waits")


def test_pods_survive_a_restart_of_their_kubelet(cluster: Kubernetes, web: Pods) -> None:
    before = containers(web)
    cluster.restart_kubelet("node-1")
    assert containers(web) == before
    with cluster.reach(web.namespace, "web", 80) as url:
        until(lambda: answers(url), "an answer of the service")


def containers(web: Pods) -> set[tuple[str, str, int]]:
    """The node, container id and number of restarts of each pod."""
    pods = json.loads(web.kubectl("get", "pods", "-o", "json"))["items"]
    statuses = [(one["spec"]["nodeName"], one["status"]["containerStatuses"][0]) for one in pods]
    return {(node, one["containerID"], one["restartCount"]) for node, one in statuses}


def test_pods_of_a_killed_node_run_again_once_it_is_back(cluster: Kubernetes, web: Pods) -> None:
    """Meanwhile the service answers through the other node's pod."""
    needs("own_cluster")
    [gone] = [container for node, container, _ in containers(web) if node == "node-2"]
    cluster.kill_node("node-2")
    try:
        cluster.kubectl("wait", "--for=condition=Ready=Unknown", "node/node-2", "--timeout=180s")
        web.wait("jsonpath={.status.readyReplicas}=1", "deployment/web")
        with cluster.reach(web.namespace, "web", 80) as url:
            until(lambda: answers(url), "an answer of the remaining pod")
    finally:
        cluster.start_node("node-2")
    web.wait("jsonpath={.status.readyReplicas}=2", "deployment/web")
    [back] = [container for node, container, _ in containers(web) if node == "node-2"]
    assert back != gone


def test_a_cluster_can_be_reached_by_its_kubeconfig_alone(
    cluster: Kubernetes, web: Pods, tmp_path: Path, programs: Path
) -> None:
    needs("own_cluster")
    existing = Kubernetes(cluster.kubeconfig, programs, tmp_path)
    assert existing.nodes == ["node-1", "node-2"]
    with existing.reach(web.namespace, "web", 80) as url:
        until(lambda: answers(url), "an answer of the service")
