"""A pool on a real cluster, from the chart's installation to its answers; and kubectl's output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.torch_pods import torch_pod_overrides
from tests.support.clients.mix import ChoiceResult
from tests.support.kubernetes.operator import RESTRICTED, install_operator
from tests.support.kubernetes.pool import ClusterPool, Row
from tests.support.kubernetes.specs import SIM_UP, sim_spec, torch_spec, torch_up
from tests.support.kubernetes.streams import answers_of_baton_up, ask_by_openai, few_questions
from tests.support.needs import needs

STARTING = {"Starting", "WaitingForNodes", "NothingApplied"}
COMPONENTS = ("prefill", "decode", "router", "kv-index", "kv-data")
PLUGIN_S = 240.0
SUMMARIES = "{.metadata.name} {.status.prefill.summary} {.status.decode.summary}{'\\n'}"


@dataclass
class Watched:
    """A pool, and what `kubectl get bpool` printed until it was ready. `rows` are samples;
    `summaries` has each change, however short."""

    pool: ClusterPool
    summaries: list[str]
    rows: list[Row] = field(default_factory=list)

    def is_ready(self) -> bool:
        """Record the row; return whether the pool reports that it is ready. If so, check it."""
        row = self.pool.row()
        if row not in self.rows:
            self.rows.append(row._replace(age=""))
        if row.ready == "True":
            self.check_ready(row)
        return row.ready == "True"

    def check_ready(self, row: Row) -> None:
        pods = {name: self.pool.pods(name) for name in COMPONENTS}
        assert all(pod.ready for some in pods.values() for pod in some), (row, pods)
        for role, summary in (("prefill", row.prefill), ("decode", row.decode)):
            assert summary == f"{len(pods[role])}/{len(pods[role])}", (row, pods)


@pytest.fixture(scope="module")
def with_operator(cluster: Kubernetes) -> Kubernetes:
    install_operator(cluster)
    return cluster


@pytest.fixture(scope="module")
def restricted(with_operator: Kubernetes) -> Iterator[str]:
    namespace = with_operator.new_namespace(**RESTRICTED)
    yield namespace
    with_operator.delete_namespace(namespace)


@pytest.fixture(scope="module")
def started(with_operator: Kubernetes, restricted: str) -> Iterator[Watched]:
    args = ("get", "bpool", "--watch", f"-o=jsonpath={SUMMARIES}", "-n", restricted)
    with (
        ClusterPool(with_operator, restricted, "sample") as pool,
        with_operator.following(*args) as summaries,
    ):
        watched = Watched(pool, summaries)
        pool.apply(sim_spec())
        pool.wait(watched.is_ready, "become ready")
        yield watched


def test_the_columns_show_each_stage_of_a_start(started: Watched) -> None:
    first, last = started.rows[0], started.rows[-1]
    assert last[1:7] == ("True", "AllReady", "True", "1/1", "1/1", "sim")
    before = [row for row in started.rows if row.ready != "True"]
    # Before the operator's first status there is nothing to print.
    assert {row.ready for row in before} <= {"False", ""}, started.rows
    assert {row.reason for row in before} <= STARTING | {""}, started.rows
    assert "sample 0/1 0/1" in started.summaries
    assert first.ready != "True"


def test_the_printed_address_works_inside_the_cluster(started: Watched) -> None:
    pool = started.pool
    [node] = pool.pods("decode")
    script = (
        f"import urllib.request as u; print(u.urlopen('{pool.row().url}/models').read().decode())"
    )
    models = pool.kubectl("exec", node.name, "--", "python3", "-c", script)
    assert '"sim"' in models


def check_answers(pool: ClusterPool, expected: list[dict[int, ChoiceResult]]) -> None:
    """Check the answers that the official client gets, and that both roles took part in each."""
    for question, choices in zip(few_questions(), expected, strict=True):
        answer = ask_by_openai(pool.url, question)
        assert answer.choices == choices
        assert "prefill-" in answer.placement, answer.placement
        assert "decode-" in answer.placement, answer.placement
    nodes = pool.state()["nodes"]
    reused = [node["load"]["reused_chunks_total"] for node in nodes if node["role"] == "decode"]
    assert sum(reused) > 0, nodes


def test_a_client_gets_the_same_answers_as_from_baton_up(started: Watched) -> None:
    check_answers(started.pool, answers_of_baton_up(SIM_UP, few_questions()))


@pytest.fixture
def plugin(started: Watched, programs: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs `kubectl baton` in the pool's namespace and returns its output."""
    program = tmp_path / "kubectl-baton"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m baton_cli.kubectl "$@"\n')
    program.chmod(0o755)
    pool = started.pool
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    environ |= {
        "PATH": os.pathsep.join((str(tmp_path), str(programs), os.environ["PATH"])),
        "KUBECONFIG": str(pool.kubernetes.kubeconfig),
        "KUBECACHEDIR": str(tmp_path / "cache"),
        "KUBERC": "off",
    }

    def run(*words: str) -> str:
        done = subprocess.run(
            ["kubectl", "baton", *words, "-n", pool.namespace],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PLUGIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    return run


def test_the_plugin_explains_the_pool_and_a_request_and_drains_a_node(
    started: Watched, plugin: Callable[..., str]
) -> None:
    pool = started.pool
    assert f"pool {pool.name} in namespace {pool.namespace} is ready" in plugin("why", pool.name)
    [node] = pool.pods("decode")

    def state() -> str:
        snapshot = json.loads(plugin("top", pool.name, "--once", "--json"))
        return next(str(one["state"]) for one in snapshot["nodes"] if one["id"] == node.name)

    body = json.dumps({"prompt": "Hello", "max_tokens": 4}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{pool.url}/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=PLUGIN_S) as answer:
        request_id = answer.headers["x-baton-request-id"]
    assert "attempt 1: " in plugin("explain", pool.name, request_id)
    assert node.name in plugin("top", pool.name, "--once")
    plugin("drain", pool.name, node.name, "--deadline", "5")
    pool.wait(lambda: state() == "draining", "drain its decode node")
    plugin("resume", pool.name, node.name)
    pool.wait(lambda: state() == "ready", "use its decode node again")
    pool.wait(started.is_ready, "be ready again")


def test_the_columns_follow_an_edit_of_the_replicas(started: Watched) -> None:
    pool, before = started.pool, len(started.summaries)
    pool.patch({"decode": {"replicas": 2}})
    pool.wait(
        lambda: "sample 1/1 1/2" in started.summaries[before:], "report that a node is missing"
    )
    row = pool.row()
    assert (row.ready, row.reason) in {("False", "Starting"), ("True", "AllReady")}
    pool.wait(started.is_ready, "have two decode nodes")
    assert started.rows[-1].decode == "2/2"
    pool.patch({"decode": {"replicas": 1}})
    pool.wait(lambda: pool.row().decode == "1/1", "have one decode node again")
    pool.wait(lambda: pool.conditions()["Scaled"]["status"] == "True", "remove the second node")
    pool.wait_ready()


def test_the_columns_name_the_reason_why_a_pool_does_not_start(
    with_operator: Kubernetes, restricted: str
) -> None:
    """One pool has two mistakes. Once the first is fixed, the columns name the second."""
    pool = ClusterPool(with_operator, restricted, "broken")
    spec = sim_spec()
    image = {"name": "node", "image": "local.test/missing:1"}
    spec["prefill"]["podTemplate"] = {"spec": {"containers": [image]}}
    spec["decode"]["resources"] = {"limits": {"nvidia.com/gpu": "99", "memory": "1Gi"}}
    pool.apply(spec)
    pool.wait(lambda: pool.row().reason == "ImagePullFailing", "name the missing image")
    conditions = pool.conditions()
    assert "local.test/missing:1" in conditions["Ready"]["message"]
    assert conditions["DecodeReady"]["reason"] == "Unschedulable"
    assert "nvidia.com/gpu" in conditions["DecodeReady"]["message"]
    assert conditions["Serving"]["status"] == "False"
    row = pool.row()
    assert (row.ready, row.prefill, row.decode) == ("False", "0/1", "0/1")
    pool.patch({"prefill": {"podTemplate": None}})
    pool.wait(
        lambda: (pool.row().reason, pool.row().prefill) == ("Unschedulable", "1/1"),
        "have a prefill node",
    )
    # A prefill node can serve whole requests, once the router knows it.
    pool.wait(lambda: pool.conditions()["Serving"]["status"] == "True", "serve by prefill alone")
    pool.patch({"decode": {"resources": {"limits": {"nvidia.com/gpu": None}}}})
    pool.wait_ready()
    row = pool.row()
    assert (row.ready, row.reason, row.nodes) == ("True", "AllReady", ("1/1", "1/1"))


def test_a_missing_secret_is_named_by_a_condition_and_an_event(
    with_operator: Kubernetes, restricted: str
) -> None:
    pool = ClusterPool(with_operator, restricted, "keyless")
    keys = {"name": "no-such-secret", "key": "keys.txt"}
    spec = sim_spec()
    spec["router"]["apiKeysSecret"] = keys
    pool.apply(spec)

    def problem() -> str:
        condition = pool.conditions().get("RouterReady", {})
        return f"{condition.get('reason')}: {condition.get('message')}"

    pool.wait(lambda: problem().startswith("ConfigMissing: "), "name the Secret")
    assert 'secret "no-such-secret" not found' in problem()

    def described_events() -> str:
        described = pool.kubectl("describe", "inferencepools.baton.dev", "keyless")
        return described.partition("Events:")[2]

    pool.wait(lambda: 'secret "no-such-secret" not found' in described_events(), "post an event")
    assert "NotReady" in described_events()
    pool.delete()


def test_a_real_model_gives_the_same_answers_as_baton_up(
    with_operator: Kubernetes, pod_model: Path
) -> None:
    needs("own_cluster")
    namespace = with_operator.new_namespace()  # the environment and the model come by hostPath
    try:
        with ClusterPool(with_operator, namespace, "torch") as pool:
            pool.apply(torch_spec(str(pod_model), torch_pod_overrides(pod_model)))
            expected = answers_of_baton_up(torch_up(pod_model), few_questions())
            pool.wait_ready()
            check_answers(pool, expected)
    finally:
        with_operator.delete_namespace(namespace)
