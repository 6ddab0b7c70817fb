"""Kubernetes for the tests in this folder.

    control_plane         etcd, API server, controllers, scheduler: everything but running pods
    fresh_control_plane   the same, one for each module that asks: to be broken
    namespace             an empty namespace of control_plane, one for each test
    window                the API of control_plane by HTTP
    proxy                 the API of `plane`, by way of a proxy that makes faults
    operator              ours as a process behind that proxy, for as long as a module runs
    stage                 a pool for that operator whose nodes are made up, one for each test
    index                 the port of a Redis with a login, that stands for a pool's
    router                what stands for all routers of a pool whose nodes are made up
    plane                 control_plane with our definition, for as long as a module runs
    pool                  a pool that may be made there, one for each test
    cluster               a control plane with two nodes that run pods, and the images for them
    pod_namespace         an empty namespace of cluster, one for each test
    calm                  `baton up` with simulated nodes: what it answers is right
    pod_model             the folder of a real, tiny model that pods may read

They live while tests of this folder run in a worker, and end before the tests of the next one.
With BATON_TEST_KUBECONFIG (`make test-cluster KUBECONFIG=...`) the same fixtures hand out that
cluster, and tests that would break it skip; its nodes must have the images already (`images`).
Files that use `cluster` are named test_node_*.py: one worker runs them all (tests/conftest.py).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_operator.api.crd import crd
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.installed import definition
from tests.cluster.machine.builds import SMALL, build_small
from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.cluster import Cluster
from tests.cluster.machine.control_plane import ControlPlane
from tests.cluster.machine.disk import node_disk
from tests.cluster.machine.programs import built_programs, say
from tests.cluster.machine.sweep import free_slot
from tests.cluster.operators import Operator, Pool, Window, tell
from tests.cluster.stage import Router, Stage, standing_router
from tests.operator.state.test_index_reader import redis_server
from tests.support.kubernetes.operator import NAMESPACE, uninstall_operator
from tests.support.kubernetes.specs import SIM_UP
from tests.support.needs import needs
from tests.support.pools.baton_up import Pool as CalmPool
from tests.support.project.debian import install_needed

# Of a whole test: the first ones boot what the others share.
LONGEST_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Here are all items, not only those of this folder."""
    for item in items:
        ours = item.path.is_relative_to(Path(__file__).parent)
        if ours and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LONGEST_S))


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
def window(
    control_plane: Kubernetes, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Window]:
    folder = tmp_path_factory.mktemp("window")
    with Window(control_plane.kubeconfig, programs, folder) as one:
        yield one


@pytest.fixture(scope="module")
def plane(control_plane: Kubernetes) -> Iterator[Kubernetes]:
    with definition(control_plane, crd()):
        yield control_plane


@pytest.fixture(scope="module")
def proxy(plane: Kubernetes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultProxy]:
    with FaultProxy(plane.kubeconfig, tmp_path_factory.mktemp("proxy")) as one:
        yield one


@pytest.fixture(scope="module")
def operator(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    with Operator(proxy.kubeconfig, tmp_path_factory.mktemp("operator")) as one:
        yield one


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a Redis with a login."""
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture
def router() -> Iterator[Router]:
    with standing_router() as one:
        yield one


@pytest.fixture
def pool(plane: Kubernetes, window: Window, namespace: str) -> Iterator[Pool]:
    one = Pool(plane, window, namespace)
    yield one
    one.delete()


@pytest.fixture
def stage(operator: Operator, pool: Pool, index: int, router: Router) -> Iterator[Stage]:
    """Its pool is not made yet."""
    yield Stage(pool, f"redis://127.0.0.1:{index}", router)
    tell(operator)


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
    build = build_small(say)
    disk = node_disk(programs, build, say)
    with free_slot() as slot, Cluster(programs, disk, slot) as one:
        for target in SMALL:
            one.import_image(build.archive(target))
        yield one


@pytest.fixture(scope="package")
def calm() -> Iterator[CalmPool]:
    with CalmPool(SIM_UP) as running:
        yield running


@pytest.fixture
def pod_namespace(cluster: Kubernetes) -> Iterator[str]:
    name = cluster.new_namespace()
    yield name
    cluster.delete_namespace(name)


@pytest.fixture(scope="module")
def pod_model(tiny_model: Callable[[str], Path]) -> Iterator[Path]:
    """Pods are not the user who saved it."""
    copy = Path(tempfile.mkdtemp(prefix="shelf-", dir="/tmp"))
    copy.chmod(0o755)
    for path in tiny_model("llama-gqa2-tied").iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
            (copy / path.name).chmod(0o644)
    yield copy
    shutil.rmtree(copy)
