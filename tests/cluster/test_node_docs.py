"""The commands of docs/kubernetes.md, run as written on a real cluster: installation, the first
answer, an upgrade, removal."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.kubernetes.documents import ROOT, cluster_commands, commands_of
from tests.support.kubernetes.operator import IMAGES, NAMESPACE, RELEASE, operator_log
from tests.support.kubernetes.streams import ask_by_openai, chat
from tests.support.needs import needs

TIMEOUT_S = 600.0
BLOCKS = [block for _, block in cluster_commands()]


class DocsReader:
    """Runs the documented commands as written, except that Helm gets this cluster's images."""

    def __init__(self, kubernetes: Kubernetes, programs: Path, folder: Path) -> None:
        self.kubernetes = kubernetes
        self._values = folder / "values.yaml"
        self._values.write_text(yaml.safe_dump({"images": IMAGES}))
        homes = {f"HELM_{kind}_HOME": str(folder) for kind in ("CACHE", "CONFIG", "DATA")}
        path = f"{programs}{os.pathsep}{os.environ['PATH']}"
        config = {"KUBECONFIG": str(kubernetes.kubeconfig), "KUBECACHEDIR": str(folder)}
        self._environ = {**os.environ, **homes, **config, "KUBERC": "off", "PATH": path}

    def run_block(self, block: str) -> str:
        """Run a block and return its output; kill what it left in the background."""
        chart = r"(helm (?:install|upgrade) \S+ charts/baton)"
        block = re.sub(chart, rf"\1 --values={self._values}", block)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p) || :' EXIT\n{block}"],
            cwd=ROOT,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}{operator_log(self.kubernetes)}"
        return done.stdout

    def choices(self) -> Any:
        """The pool's answer to a greedy request, sent to the Service without a port forward."""
        with self.kubernetes.reach("default", "hello-router", 8000) as url:
            return ask_by_openai(url, chat("Hello", temperature=0, max_tokens=16)).choices

    def pods(self) -> list[str]:
        args = ("get", "pods", "-l", "baton.dev/pool=hello", "-o=name")
        return sorted(self.kubernetes.kubectl(*args).split())


@pytest.fixture(scope="module")
def reader(
    cluster: Kubernetes, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DocsReader]:
    """A reader on a cluster without Baton, before and after the tests."""
    remove_baton(cluster)
    try:
        yield DocsReader(cluster, programs, tmp_path_factory.mktemp("reader"))
    finally:
        remove_baton(cluster)


def remove_baton(cluster: Kubernetes) -> None:
    needs("own_cluster")
    if cluster.helm("list", "--short", "-n", NAMESPACE):
        cluster.helm("uninstall", RELEASE, "-n", NAMESPACE, "--wait")
    crds = ("crd/inferencepools.baton.dev", "crd/poolscalers.baton.dev")
    for name in (*crds, f"namespace/{NAMESPACE}"):
        cluster.kubectl("delete", name, "--ignore-not-found", "--timeout=300s")


@dataclass
class FirstAnswer:
    """The results of the first five commands: the last output, the pool's pods and choices."""

    printed: str
    pods: list[str]
    choices: Any


@pytest.fixture(scope="module")
def first_answer(reader: DocsReader) -> FirstAnswer:
    printed = reader.run_block(BLOCKS[0])
    return FirstAnswer(printed.splitlines()[-1], reader.pods(), reader.choices())


def test_the_documents_reach_the_first_answer_in_five_commands() -> None:
    assert len(commands_of(BLOCKS[0])) == 5
    assert len(BLOCKS) == 5


def test_the_first_five_commands_give_an_answer(first_answer: FirstAnswer) -> None:
    [choice] = json.loads(first_answer.printed)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"]
    assert len(first_answer.pods) == 5


def test_two_operators_run_on_different_machines_and_only_one_can_be_evicted(
    reader: DocsReader, first_answer: FirstAnswer
) -> None:
    needs("own_cluster")
    reader.run_block(BLOCKS[1])
    selector = "app.kubernetes.io/name=baton-operator"
    args = ("get", "pods", "-n", NAMESPACE, "-l", selector, "-o=json")
    pods = json.loads(reader.kubernetes.kubectl(*args))["items"]
    machines = {
        pod["metadata"]["name"]: pod["spec"]["nodeName"]
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }
    assert len(machines) == 2
    assert len(set(machines.values())) == 2

    def evict(name: str) -> str:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": NAMESPACE},
        }
        return reader.kubernetes.kubectl(
            "create", "--raw", path, "-f", "-", stdin=json.dumps(eviction)
        )

    first, second = machines
    evict(first)
    with pytest.raises(CommandFailed, match="disruption budget"):
        evict(second)
    assert reader.pods() == first_answer.pods


def test_upgrade_and_rollback_leave_the_pool_unchanged(
    reader: DocsReader, first_answer: FirstAnswer
) -> None:
    reader.run_block(BLOCKS[2])
    assert reader.choices() == first_answer.choices
    assert reader.pods() == first_answer.pods


def test_after_uninstalling_the_pool_serves_and_can_be_removed(
    reader: DocsReader, first_answer: FirstAnswer
) -> None:
    assert "hello" in reader.run_block(BLOCKS[3])
    assert reader.choices() == first_answer.choices
    assert reader.pods() == first_answer.pods
    reader.run_block(BLOCKS[4])
    with pytest.raises(CommandFailed, match="doesn't have a resource type"):
        reader.kubernetes.kubectl("get", "bpool")
    assert reader.pods() == []
