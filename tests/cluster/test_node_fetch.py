"""A pool fetches its model from a hub once for all its pods, and says how far it is."""

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
    """On this machine, which own clusters reach, and nothing else."""
    needs("own_cluster")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with StubHub(files, name=MODEL, host=cluster.host_address) as running:
        running.token = TOKEN
        yield running


@pytest.fixture
def shelf() -> Iterator[str]:
    """A folder that all nodes of a cluster on this machine share; a kubelet makes it."""
    outer = Path(tempfile.mkdtemp(prefix="shelf-", dir="/tmp"))
    outer.chmod(0o755)
    yield str(outer / "models")
    shutil.rmtree(outer)


@pytest.fixture
def pool(cluster: Kubernetes, shelf: str) -> Iterator[ClusterPool]:
    """Its pods are gone before the shelf is: they would make it again."""
    needs("own_cluster")
    install_operator(cluster)
    namespace = cluster.new_namespace()  # the cache is a hostPath
    try:
        with ClusterPool(cluster, namespace, "fetched") as made:
            yield made
            made.delete()
    finally:
        cluster.delete_namespace(namespace)


def fetching_spec(hub: StubHub, shelf: str) -> Json:
    endpoint = {"name": "fetch-model", "env": [{"name": "HF_ENDPOINT", "value": hub.url}]}
    spec = sim_spec()
    for role in ("prefill", "decode"):
        spec[role]["podTemplate"] = {"spec": {"initContainers": [endpoint]}}
    spec["model"] = {
        "uri": f"hf://{MODEL}@v1",
        "secretRef": {"name": "hub"},
        "cache": {"hostPath": shelf},
    }
    return spec


def test_two_pods_share_one_fetch_whose_progress_is_told(
    pool: ClusterPool, hub: StubHub, shelf: str, folder: Path
) -> None:
    hub.held = threading.Event()
    pool.kubectl("create", "secret", "generic", "hub", f"--from-literal=token={TOKEN}")
    pool.apply(fetching_spec(hub, shelf))
    pool.wait(lambda: "%" in _progress(pool), "say how far the fetch is")
    said = pool.conditions()["ModelReady"]
    assert (said["status"], said["reason"]) == ("False", "Fetching")
    assert "%" in said["message"]
    assert pool.row().ready == "False"
    hub.held.set()
    expected = answers_of_baton_up((*SIM_UP, "--model", str(folder)), few_questions())
    pool.wait_ready()
    said = pool.conditions()["ModelReady"]
    assert (said["status"], said["reason"]) == ("True", "Fetched")
    assert _progress(pool) == ""
    assert answers_of(pool.url, few_questions()) == expected
    # Two pods, one fetch; its login came from the Secret and is told to nobody.
    assert len(hub.ranges_of("tokenizer.json")) == 1
    assert hub.tokens == {f"Bearer {TOKEN}"}
    texts = shown(pool.kubernetes, pool.namespace)
    assert [name for name, text in texts.items() if TOKEN in text] == []


def _progress(pool: ClusterPool) -> str:
    status = pool.read("bpool", pool.name).get("status", {})
    progress: str = status.get("model", {}).get("progress", "")
    return progress


def test_a_hub_that_refuses_the_login_is_named_until_it_is_right(
    pool: ClusterPool, hub: StubHub, shelf: str
) -> None:
    pool.kubectl("create", "secret", "generic", "hub", "--from-literal=token=another_one")
    pool.apply(fetching_spec(hub, shelf))
    pool.wait(lambda: pool.row().reason == "ModelFetchFailing", "name the refusal")
    message = pool.conditions()["ModelReady"]["message"]
    assert "401" in message
    assert "secretRef" in message


def test_a_model_that_its_storage_cannot_hold_is_named_until_there_is_more(
    pool: ClusterPool, hub: StubHub, shelf: str
) -> None:
    """Each pod fetches its own, into ephemeral storage that it asked for."""
    pool.kubectl("create", "secret", "generic", "hub", f"--from-literal=token={TOKEN}")
    spec = fetching_spec(hub, shelf)
    del spec["model"]["cache"]
    pool.apply({**spec, "model": {**spec["model"], "storage": "1Mi"}})
    pool.wait(lambda: pool.row().reason == "ModelFetchFailing", "name what it lacks")
    assert "model.storage" in pool.conditions()["ModelReady"]["message"]
    assert hub.ranges_of("tokenizer.json") == []
    pool.apply({**spec, "model": {**spec["model"], "storage": "64Mi"}})
    pool.wait_ready()
    assert len(hub.ranges_of("tokenizer.json")) == 2
