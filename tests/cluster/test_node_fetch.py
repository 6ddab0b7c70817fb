"""A pool fetches its model from a hub once for all its pods, and reports the progress."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.machine.client import Kubernetes
from tests.support.clients.http import Json
from tests.support.hubs.stub_hub import StubHub
from tests.support.kubernetes.dump import shown
from tests.support.kubernetes.operator import install_operator
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import SIM_UP, sim_spec
from tests.support.kubernetes.streams import answers_of, answers_of_baton_up, few_questions
from tests.support.needs import needs

MODEL = "org/tiny"
TOKEN = "hf_of_nobody_else_0123456789"


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama-gqa2-tied")


@pytest.fixture
def hub(cluster: Kubernetes, folder: Path) -> Iterator[StubHub]:
    """A hub on this machine, the only host that clusters of our own reach."""
    needs("own_cluster")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with StubHub(files, name=MODEL, host=cluster.host_address) as running:
        running.token = TOKEN
        yield running


@pytest.fixture
def shared_folder() -> Iterator[str]:
    """A folder that all nodes of a cluster on this machine share. A kubelet creates it."""
    outer = Path(tempfile.mkdtemp(prefix="shelf-", dir="/tmp"))
    outer.chmod(0o755)
    yield str(outer / "models")
    shutil.rmtree(outer)


@pytest.fixture
def pool(cluster: Kubernetes, shared_folder: str) -> Iterator[ClusterPool]:
    """A pool that is deleted before the shared folder, which its pods would create again."""
    needs("own_cluster")
    install_operator(cluster)
    namespace = cluster.new_namespace()  # the cache is a hostPath
    try:
        with ClusterPool(cluster, namespace, "fetched") as made:
            yield made
            made.delete()
    finally:
        cluster.delete_namespace(namespace)


def fetching_spec(hub: StubHub, shared_folder: str) -> Json:
    endpoint = {"name": "fetch-model", "env": [{"name": "HF_ENDPOINT", "value": hub.url}]}
    spec = sim_spec()
    for role in ("prefill", "decode"):
        spec[role]["podTemplate"] = {"spec": {"initContainers": [endpoint]}}
    spec["model"] = {
        "uri": f"hf://{MODEL}@v1",
        "secretRef": {"name": "hub"},
        "cache": {"hostPath": shared_folder},
    }
    return spec


def test_two_pods_share_one_fetch_and_the_pool_reports_its_progress(
    pool: ClusterPool, hub: StubHub, shared_folder: str, folder: Path
) -> None:
    hub.held = threading.Event()
    pool.kubectl("create", "secret", "generic", "hub", f"--from-literal=token={TOKEN}")
    pool.apply(fetching_spec(hub, shared_folder))
    pool.wait(lambda: "%" in _progress(pool), "report the fetch's progress")
    condition = pool.conditions()["ModelReady"]
    assert (condition["status"], condition["reason"]) == ("False", "Fetching")
    assert "%" in condition["message"]
    assert pool.row().ready == "False"
    hub.held.set()
    expected = answers_of_baton_up((*SIM_UP, "--model", str(folder)), few_questions())
    pool.wait_ready()
    condition = pool.conditions()["ModelReady"]
    assert (condition["status"], condition["reason"]) == ("True", "Fetched")
    assert _progress(pool) == ""
    assert answers_of(pool.url, few_questions()) == expected
    # Two pods, one fetch. Its login comes from the Secret and is shown nowhere else.
    assert len(hub.ranges_of("tokenizer.json")) == 1
    assert hub.tokens == {f"Bearer {TOKEN}"}
    texts = shown(pool.kubernetes, pool.namespace)
    assert [name for name, text in texts.items() if TOKEN in text] == []


def _progress(pool: ClusterPool) -> str:
    status = pool.read("bpool", pool.name).get("status", {})
    progress: str = status.get("model", {}).get("progress", "")
    return progress


def test_a_refused_login_at_the_hub_is_reported_in_the_condition(
    pool: ClusterPool, hub: StubHub, shared_folder: str
) -> None:
    pool.kubectl("create", "secret", "generic", "hub", "--from-literal=token=another_one")
    pool.apply(fetching_spec(hub, shared_folder))
    pool.wait(lambda: pool.row().reason == "ModelFetchFailing", "name the refusal")
    message = pool.conditions()["ModelReady"]["message"]
    assert "401" in message
    assert "secretRef" in message


def test_a_model_larger_than_its_storage_is_reported_until_the_storage_grows(
    pool: ClusterPool, hub: StubHub, shared_folder: str
) -> None:
    """Without a cache, each pod fetches the model into its own ephemeral storage."""
    pool.kubectl("create", "secret", "generic", "hub", f"--from-literal=token={TOKEN}")
    spec = fetching_spec(hub, shared_folder)
    del spec["model"]["cache"]
    pool.apply({**spec, "model": {**spec["model"], "storage": "1Mi"}})
    pool.wait(lambda: pool.row().reason == "ModelFetchFailing", "name what it lacks")
    assert "model.storage" in pool.conditions()["ModelReady"]["message"]
    assert hub.ranges_of("tokenizer.json") == []
    pool.apply({**spec, "model": {**spec["model"], "storage": "64Mi"}})
    pool.wait_ready()
    assert len(hub.ranges_of("tokenizer.json")) == 2
