"""Kubernetes for the tests in this folder.

    control_plane         etcd, API server, controllers and scheduler; no node runs pods
    fresh_control_plane   another control plane for one module, which may break it
    namespace             an empty namespace of control_plane for one test
    api_client            an HTTP client of control_plane's API
    plane                 control_plane with our CustomResourceDefinition, for one module
    proxy                 a proxy to the API of `plane` that injects faults
    operator              the operator as a process behind that proxy, for one module
    pool                  an InferencePool that a test can create, one for each test
    fake_pool             a pool of that operator with fake nodes, one for each test
    router                the fake router of such a pool
    index                 the port of a Redis with a login, the index of such a pool
    cluster               a control plane with two nodes that run pods, and the images for them
    pod_namespace         an empty namespace of cluster for one test
    reference_pool        `baton up` with simulated nodes, whose answers are the expected ones
    pod_model             the folder of a real, tiny model that pods may read

Fixtures of scope package live while a worker runs tests of this folder, and end before it runs
tests of another. With BATON_TEST_KUBECONFIG (`make test-cluster KUBECONFIG=...`) the fixtures
return that cluster, and tests that would break it skip; its nodes must already have the images
(see `images`). Files that use `cluster` are named test_node_*.py, so that one worker runs them all
(see tests/conftest.py).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_operator.api.crd import crd
from tests.cluster.fake_pool import FakePool, FakeRouter, fake_router
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.installed import definition
from tests.cluster.machine.builds import SMALL, build_small
from tests.cluster.machine.client import Kubernetes
from tests.cluster.machine.cluster import Cluster
from tests.cluster.machine.control_plane import ControlPlane
from tests.cluster.machine.disk import node_disk
from tests.cluster.machine.programs import built_programs, print_progress
from tests.cluster.machine.sweep import free_slot
from tests.cluster.operators import ApiClient, Operator, Pool, print_log
from tests.operator.index_servers import redis_server
from tests.support.kubernetes.operator import NAMESPACE, uninstall_operator
from tests.support.kubernetes.specs import SIM_UP
from tests.support.needs import needs
from tests.support.pools.baton_up import Pool as ReferencePool
from tests.support.project.debian import install_needed

# For a whole test: the first one boots what the others share.
TEST_TIMEOUT_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`items` holds the tests of all folders, so select those of this one."""
    for item in items:
        ours = item.path.is_relative_to(Path(__file__).parent)
        if ours and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


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
def api_client(
    control_plane: Kubernetes, programs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiClient]:
    folder = tmp_path_factory.mktemp("api-client")
    with ApiClient(control_plane.kubeconfig, programs, folder) as one:
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
    """The port of a Redis that needs a login."""
    with redis_server(tmp_path_factory.mktemp("redis")) as port:
        yield port


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    with fake_router() as one:
        yield one


@pytest.fixture
def pool(plane: Kubernetes, api_client: ApiClient, namespace: str) -> Iterator[Pool]:
    one = Pool(plane, api_client, namespace)
    yield one
    one.delete()


@pytest.fixture
def fake_pool(operator: Operator, pool: Pool, index: int, router: FakeRouter) -> Iterator[FakePool]:
    """A pool that the test has yet to start."""
    yield FakePool(pool, f"redis://127.0.0.1:{index}", router)
    print_log(operator)


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
    install_needed(print_progress)
    build = build_small(print_progress)
    disk = node_disk(programs, build, print_progress)
    with free_slot() as slot, Cluster(programs, disk, slot) as one:
        for target in SMALL:
            one.import_image(build.archive(target))
        yield one


@pytest.fixture(scope="package")
def reference_pool() -> Iterator[ReferencePool]:
    with ReferencePool(SIM_UP) as running:
        yield running


@pytest.fixture
def pod_namespace(cluster: Kubernetes) -> Iterator[str]:
    name = cluster.new_namespace()
    yield name
    cluster.delete_namespace(name)


@pytest.fixture(scope="module")
def pod_model(tiny_model: Callable[[str], Path]) -> Iterator[Path]:
    """A copy that pods may read, as they run as another user than the tests."""
    copy = Path(tempfile.mkdtemp(prefix="shelf-", dir="/tmp"))
    copy.chmod(0o755)
    for path in tiny_model("llama-gqa2-tied").iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
            (copy / path.name).chmod(0o644)
    yield copy
    shutil.rmtree(copy)
