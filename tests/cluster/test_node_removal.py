"""Nothing is left of a pool that is deleted, and what goes first takes nobody along."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest

from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.kubernetes.dump import cluster_object_names, object_names, shown
from tests.support.kubernetes.operator import (
    NAMESPACE,
    RESTRICTED,
    install_operator,
    uninstall_operator,
)
from tests.support.kubernetes.pool import ClusterPool
from tests.support.kubernetes.specs import sim_spec
from tests.support.kubernetes.streams import answers_of, few_questions
from tests.support.needs import needs


@pytest.fixture(scope="module")
def operated(cluster: Kubernetes) -> Kubernetes:
    needs("own_cluster")  # the operator goes before its pools
    install_operator(cluster)
    return cluster


@pytest.fixture(scope="module")
def empty(operated: Kubernetes) -> Iterator[str]:
    namespace = operated.new_namespace(**RESTRICTED)
    yield namespace
    operated.delete_namespace(namespace)


@pytest.fixture(scope="module")
def before(operated: Kubernetes, empty: str) -> set[str]:
    """What there is without a pool."""
    return object_names(operated, empty) | cluster_object_names(operated)


@pytest.fixture(scope="module")
def pool(operated: Kubernetes, empty: str, before: set[str]) -> Iterator[ClusterPool]:
    with ClusterPool(operated, empty, "brief") as running:
        running.apply(sim_spec())
        running.wait_ready()
        answers_of(running.url, few_questions())
        yield running


def test_no_secret_value_is_shown_anywhere_but_in_its_secret(
    operated: Kubernetes, pool: ClusterPool
) -> None:
    encoded = pool.read("secret", f"{pool.name}-auth")["data"]
    values = {name: base64.b64decode(value).decode() for name, value in encoded.items()}
    hidden = {*encoded.values(), *values.values(), values["users.acl"].split("#")[1].split()[0]}
    assert all(len(one) > 20 for one in hidden), "too short to look for"
    texts = shown(operated, pool.namespace) | shown(operated, NAMESPACE)
    texts["helm"] = operated.helm("get", "all", "baton", "--namespace", NAMESPACE)
    texts["/pool"] = str(pool.state())
    assert any(name.startswith("log of") and text for name, text in texts.items())
    leaks = [name for name, text in texts.items() for one in hidden if one in text]
    assert leaks == []


def test_who_has_not_the_secret_gets_neither_into_redis_nor_into_a_node(pool: ClusterPool) -> None:
    [router], [node] = pool.pods("router"), pool.pods("decode")
    # Each from where a NetworkPolicy would let it through.
    tried = [
        (router, f"import redis; redis.Redis('{pool.name}-kv-index').ping()", "Authentication"),
        (node, f"import redis; redis.Redis('{pool.name}-kv-data-0').ping()", "Authentication"),
        (
            router,
            f"from urllib.request import *; urlopen('http://{node.address}:9000/link')",
            "401",
        ),
    ]
    for pod, script, refusal in tried:
        with pytest.raises(CommandFailed, match=refusal):
            pool.kubectl("exec", pod.name, "--", "python3", "-c", script)


def test_a_deleted_pool_leaves_no_object_behind(
    operated: Kubernetes, pool: ClusterPool, before: set[str]
) -> None:
    there = object_names(operated, pool.namespace)
    assert len(there - before) > 10, there
    pool.kubectl("delete", "bpool", pool.name, "--timeout=300s")

    def left() -> set[str]:
        now = object_names(operated, pool.namespace) | cluster_object_names(operated)
        return now - before

    pool.wait(lambda: not left(), "leave nothing behind")


def test_without_the_chart_pools_serve_and_can_be_deleted(operated: Kubernetes) -> None:
    namespace = operated.new_namespace(**RESTRICTED)
    questions = few_questions()
    try:
        with ClusterPool(operated, namespace, "orphan") as pool:
            pool.apply(sim_spec())
            pool.wait_ready()
            expected, uids = answers_of(pool.url, questions), _uids(pool)
            uninstall_operator(operated)
            assert "orphan" in pool.kubectl("get", "bpool")
            assert answers_of(pool.url, questions) == expected
            assert _uids(pool) == uids
            pool.delete()
        operated.kubectl("delete", "namespace", namespace, "--timeout=300s")
    finally:
        operated.delete_namespace(namespace)


def _uids(pool: ClusterPool) -> list[str]:
    return [pod.uid for name in ("prefill", "decode", "router") for pod in pool.pods(name)]
