"""Names, revisions, owners: what must not change, and what must."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.builders import build_pool
from baton_operator.builders.nodes import build_nodes, revision_of
from baton_operator.pool import LONGEST_NAME
from tests.support.manifests import IMAGES, SAMPLES, sample_pool

SAME = {
    "replicas": {"prefill": {"replicas": 3}, "decode": {"replicas": 0}},
    "the router's business": {"handoff": "never", "missingRolePolicy": "queue"},
    "the store's business": {"kvStore": {"managed": {"memory": "2Gi"}}},
    "the default said": {"kvStore": {"managed": {"dataInstances": 1}}},
}
OTHER: dict[str, dict[str, Any]] = {
    "model": {"model": {"path": "/models/other"}},
    "dtype": {"engine": {"kind": "sim", "chunkBlocks": 1, "dtype": "float32"}},
    "length": {"engine": {"kind": "sim", "chunkBlocks": 1, "maxModelLen": 4096}},
    "chunks": {"engine": {"kind": "sim", "chunkBlocks": 2, "maxModelLen": 2048}},
    "data instances": {"kvStore": {"managed": {"dataInstances": 2}}},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_same_pool_gives_the_same_manifests(name: str) -> None:
    assert build_pool(sample_pool(name)) == build_pool(sample_pool(name))


@pytest.mark.parametrize("changed", SAME.values(), ids=SAME)
def test_what_no_pod_of_a_node_is_told_leaves_its_revision(changed: dict[str, Any]) -> None:
    before, after = sample_pool("sim"), sample_pool("sim", **changed)
    assert revision_of(after) == revision_of(before)
    for role in ("prefill", "decode"):
        old, new = build_nodes(before, role), build_nodes(after, role)
        assert new["metadata"] == old["metadata"]
        assert new["spec"]["template"] == old["spec"]["template"]


@pytest.mark.parametrize("changed", OTHER.values(), ids=OTHER)
def test_another_template_is_another_revision_beside_the_old(changed: dict[str, Any]) -> None:
    before, after = sample_pool("sim"), sample_pool("sim", **changed)
    assert revision_of(after) != revision_of(before)
    for role in ("prefill", "decode"):
        old, new = build_nodes(before, role), build_nodes(after, role)
        assert new["metadata"]["name"] != old["metadata"]["name"]
        # Neither Deployment's selector takes the other's pods.
        labels = new["spec"]["template"]["metadata"]["labels"]
        assert not old["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_another_node_image_is_another_revision_and_another_router_image_is_none() -> None:
    before = revision_of(sample_pool("sim"))
    node = msgspec.structs.replace(IMAGES, node="registry.example/baton-node:0.2.0")
    router = msgspec.structs.replace(IMAGES, router="registry.example/baton-router:0.2.0")
    assert revision_of(sample_pool("sim", node)) != before
    assert revision_of(sample_pool("sim", router)) == before


@pytest.mark.parametrize("name", SAMPLES)
def test_every_object_is_named_apart_labelled_and_owned_by_its_pool(name: str) -> None:
    pool = sample_pool(name)
    manifests = build_pool(pool)
    seen = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    assert len(seen) == len(manifests)
    for manifest in manifests:
        metadata = manifest["metadata"]
        assert metadata["namespace"] == pool.namespace
        assert metadata["labels"]["baton.dev/pool"] == pool.name
        [owner] = metadata["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (pool.uid, True)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_workload_and_its_service_select_exactly_its_own_pods(name: str) -> None:
    manifests = build_pool(sample_pool(name))
    pods = {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["metadata"]["labels"]
        for manifest in manifests
        if "template" in manifest["spec"]
    }
    for manifest in manifests:
        selector = manifest["spec"]["selector"]
        selector = selector.get("matchLabels", selector)
        chosen = [pod for pod, labels in pods.items() if selector.items() <= labels.items()]
        assert chosen == [manifest["metadata"]["name"]]


def test_the_longest_pool_name_still_gives_legal_names_and_labels() -> None:
    pool = msgspec.structs.replace(sample_pool("sim"), name="a" * LONGEST_NAME)
    for manifest in build_pool(pool):
        # A StatefulSet's pods carry its name and a hash of 10 in one label.
        limit = 63 - (11 if manifest["kind"] == "StatefulSet" else 0)
        assert len(manifest["metadata"]["name"]) <= limit
        assert max(map(len, manifest["metadata"]["labels"].values())) <= 63


@pytest.mark.parametrize("name", SAMPLES)
def test_pods_outlive_their_drain_and_see_nothing_of_the_cluster(name: str) -> None:
    for manifest in build_pool(sample_pool(name)):
        if "template" not in manifest["spec"]:
            continue
        pod = manifest["spec"]["template"]["spec"]
        assert (pod["enableServiceLinks"], pod["automountServiceAccountToken"]) == (False, False)
        [container] = pod["containers"]
        for word in container["args"]:
            if word.startswith("--drain-timeout="):
                assert pod["terminationGracePeriodSeconds"] > int(word.split("=")[1])


def test_a_managed_server_may_use_more_memory_than_its_values() -> None:
    manifests = build_pool(sample_pool("torch"))
    [data] = [one for one in manifests if one["kind"] == "StatefulSet"]
    [container] = data["spec"]["template"]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    maxmemory = int(container["args"][container["args"].index("--maxmemory") + 1])
    assert maxmemory == 8 << 30
    assert limit >= maxmemory * 5 // 4
