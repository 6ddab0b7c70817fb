"""Kubernetes for the tests in this folder.

    control_plane         etcd, API server, controllers, scheduler: everything but running pods
    fresh_control_plane   the same, one for each module that asks: to be broken
    namespace             an empty namespace of control_plane, one for each test
    cluster               a control plane with two nodes that run pods, and the images for them
    pod_namespace         an empty namespace of cluster, one for each test

They live while tests of this folder run in a worker, and end before the tests of the next one.
With BATON_TEST_KUBECONFIG (`make test-cluster KUBECONFIG=...`) the same fixtures hand out that
cluster, and tests that would break it skip; its nodes must have the images already (`images`).
Files that use `cluster` are named test_node_*.py: one worker runs them all (tests/conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.cluster import Cluster
from tests.cluster.machine.control_plane import ControlPlane
from tests.cluster.machine.disk import node_disk
from tests.cluster.machine.images import write_baton_image
from tests.cluster.machine.packages import install_needed
from tests.cluster.machine.programs import built_programs, say
from tests.cluster.machine.sweep import free_slot
from tests.support.cluster_operator import NAMESPACE, uninstall_operator
from tests.support.needs import needs


@pytest.fixture(scope="package")
def programs() -> Path:
    needs("control_plane")
    folder = built_programs()
    assert folder is not None, "Kubernetes is not built; do so (5 to 8 minutes): make cluster-tools"
    return folder


def _control_plane(programs: Path, folder: Path) -> Iterator[Kubernetes]:
    if existing := os.environ.get("BATON_TEST_KUBECONFIG"):
        yield Kubernetes(Path(existing), programs, folder)
    else:
        with ControlPlane(programs, folder) as one:
            yield one


@pytest.fixture(scope="package")
def control_plane(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    yield from _control_plane(programs, tmp_path_factory.mktemp("control-plane"))


@pytest.fixture(scope="module")
def fresh_control_plane(
    programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubernetes]:
    yield from _control_plane(programs, tmp_path_factory.mktemp("control-plane"))


@pytest.fixture
def namespace(control_plane: Kubernetes) -> Iterator[str]:
    name = control_plane.new_namespace()
    yield name
    control_plane.delete_namespace(name)


@pytest.fixture(scope="package")
def cluster(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    folder = tmp_path_factory.mktemp("cluster")
    if existing := os.environ.get("BATON_TEST_KUBECONFIG"):
        foreign = Kubernetes(Path(existing), programs, folder)
        yield foreign
        uninstall_operator(foreign)
        foreign.delete_namespace(NAMESPACE)
        return
    needs("cluster")
    install_needed(say)
    disk = node_disk(programs, say)
    with free_slot() as slot, Cluster(programs, disk, slot) as one:
        write_baton_image(folder / "baton.tar", say)
        one.import_image(folder / "baton.tar")
        (folder / "baton.tar").unlink()
        yield one


@pytest.fixture
def pod_namespace(cluster: Kubernetes) -> Iterator[str]:
    name = cluster.new_namespace()
    yield name
    cluster.delete_namespace(name)
