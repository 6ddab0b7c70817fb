"""A deleted pool leaves nothing behind, and pools survive the removal of the operator."""

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
def with_operator(cluster: Kubernetes) -> Kubernetes:
    needs("own_cluster")  # it removes the operator before its pools
    install_operator(cluster)
    return cluster


@pytest.fixture(scope="module")
def empty(with_operator: Kubernetes) -> Iterator[str]:
    namespace = with_operator.new_namespace(**RESTRICTED)
    yield namespace
    with_operator.delete_namespace(namespace)


@pytest.fixture(scope="module")
def before(with_operator: Kubernetes, empty: str) -> set[str]:
    """The names of all objects before there is a pool."""
    return object_names(with_operator, empty) | cluster_object_names(with_operator)


@pytest.fixture(scope="module")
def pool(with_operator: Kubernetes, empty: str, before: set[str]) -> Iterator[ClusterPool]:
    with ClusterPool(with_operator, empty, "brief") as running:
        running.apply(sim_spec())
        running.wait_ready()
        answers_of(running.url, few_questions())
        yield running


def test_a_secret_s_values_are_shown_nowhere_else(
    with_operator: Kubernetes, pool: ClusterPool
) -> None:
    encoded = pool.read("secret", f"{pool.name}-auth")["data"]
    values = {name: base64.b64decode(value).decode() for name, value in encoded.items()}
    hidden = {*encoded.values(), *values.values(), values["users.acl"].split("#")[1].split()[0]}
    assert all(len(one) > 20 for one in hidden), "a value is too short to search for"
    texts = shown(with_operator, pool.namespace) | shown(with_operator, NAMESPACE)
    texts["helm"] = with_operator.helm("get", "all", "baton", "--namespace", NAMESPACE)
    texts["/pool"] = str(pool.state())
    assert any(name.startswith("log of") and text for name, text in texts.items())
    leaks = [name for name, text in texts.items() for one in hidden if one in text]
    assert leaks == []


def test_without_the_secret_redis_and_nodes_refuse_connections(pool: ClusterPool) -> None:
    [router], [node] = pool.pods("router"), pool.pods("decode")
    # Each connection starts from a pod that the NetworkPolicies allow.
    attempts = [
        (router, f"import redis; redis.Redis('{pool.name}-kv-index').ping()", "Authentication"),
        (node, f"import redis; redis.Redis('{pool.name}-kv-data-0').ping()", "Authentication"),
        (
            router,
            f"from urllib.request import *; urlopen('http://{node.address}:9000/link')",
            "401",
        ),
    ]
    for pod, script, refusal in attempts:
        with pytest.raises(CommandFailed, match=refusal):
            pool.kubectl("exec", pod.name, "--", "python3", "-c", script)


def test_a_deleted_pool_leaves_no_object(
    with_operator: Kubernetes, pool: ClusterPool, before: set[str]
) -> None:
    existing = object_names(with_operator, pool.namespace)
    assert len(existing - before) > 10, existing
    pool.kubectl("delete", "bpool", pool.name, "--timeout=300s")

    def left() -> set[str]:
        now = object_names(with_operator, pool.namespace) | cluster_object_names(with_operator)
        return now - before

    pool.wait(lambda: not left(), "leave nothing behind")


def test_without_the_operator_pools_serve_and_can_be_deleted(with_operator: Kubernetes) -> None:
    namespace = with_operator.new_namespace(**RESTRICTED)
    questions = few_questions()
    try:
        with ClusterPool(with_operator, namespace, "orphan") as pool:
            pool.apply(sim_spec())
            pool.wait_ready()
            expected, uids = answers_of(pool.url, questions), _uids(pool)
            uninstall_operator(with_operator)
            assert "orphan" in pool.kubectl("get", "bpool")
            assert answers_of(pool.url, questions) == expected
            assert _uids(pool) == uids
            pool.delete()
        with_operator.kubectl("delete", "namespace", namespace, "--timeout=300s")
    finally:
        with_operator.delete_namespace(namespace)


def _uids(pool: ClusterPool) -> list[str]:
    return [pod.uid for name in ("prefill", "decode", "router") for pod in pool.pods(name)]
