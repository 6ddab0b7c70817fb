"""Names, revisions and owners of built manifests: which changes keep them and which do not."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from baton_operator.api.pool import Installation, Pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.builders import build_pool
from baton_operator.builders.nodes import revision_of
from baton_operator.builders.store_access import store_settings
from baton_operator.names import LONGEST_POOL_NAME
from tests.support.kubernetes.manifests import (
    IMAGES,
    INSTALLATION,
    SAMPLES,
    containers,
    sample_pool,
    template_of,
    templates,
)

SAME: dict[str, dict[str, Any]] = {
    "replicas": {"prefill": {"replicas": 3}, "decode": {"replicas": 0}},
    "router settings": {"handoff": "never", "missingRolePolicy": "queue"},
    "store memory": {"kvStore": {"managed": {"memory": "2Gi"}}},
    "an explicit default": {"kvStore": {"managed": {"dataInstances": 1}}},
    "served model name": {"model": {"name": "chat"}},
    "router placement": {"router": {"placement": "random"}},
    "router replicas and ingress": {
        "router": {"replicas": 3, "ingress": {"host": "llm.example.com"}}
    },
    "network policy": {"networkPolicy": {"enabled": False}},
    "paused": {"paused": True},
}
OTHER: dict[str, dict[str, Any]] = {
    "model": {"model": {"path": "/models/other"}},
    "dtype": {"engine": {"kind": "sim", "chunkBlocks": 1, "dtype": "float32"}},
    "quantization": {"engine": {"kind": "sim", "chunkBlocks": 1, "quantization": "int8"}},
    "batch invariance": {"engine": {"kind": "sim", "chunkBlocks": 1, "batchInvariant": True}},
    "KV in 8 bits": {"engine": {"kind": "sim", "chunkBlocks": 1, "kvCacheDtype": "int8"}},
    "store codec": {"engine": {"kind": "sim", "chunkBlocks": 1, "storeCodec": "int8"}},
    "model length": {"engine": {"kind": "sim", "chunkBlocks": 1, "maxModelLen": 4096}},
    "chunk size": {"engine": {"kind": "sim", "chunkBlocks": 2, "maxModelLen": 2048}},
    "data instances": {"kvStore": {"managed": {"dataInstances": 2}}},
    "resources": {"prefill": {"resources": {"limits": {"memory": "2Gi"}}}},
    "pod template": {"decode": {"podTemplate": {"spec": {"priorityClassName": "high"}}}},
    "start timeout": {"engine": {"kind": "sim", "chunkBlocks": 1, "startTimeoutSeconds": 700}},
    "extra flag": {"engine": {"kind": "sim", "extraArgs": ["--sim-decode-ms=5"]}},
}


def nodes(pool: Pool, role: str) -> dict[str, Any]:
    """Return the role's Deployment."""
    prefix = f"demo-{role}-"
    return next(one for one in build_pool(pool) if one["metadata"]["name"].startswith(prefix))


@pytest.mark.parametrize("changed", SAME.values(), ids=SAME)
def test_changes_outside_the_node_pods_keep_the_revision(changed: dict[str, Any]) -> None:
    before, after = sample_pool("sim"), sample_pool("sim", **changed)
    assert revision_of(after).name == revision_of(before).name
    for role in ("prefill", "decode"):
        old, new = nodes(before, role), nodes(after, role)
        assert new["metadata"] == old["metadata"]
        assert new["spec"]["template"] == old["spec"]["template"]


@pytest.mark.parametrize("changed", OTHER.values(), ids=OTHER)
def test_a_changed_template_gives_a_new_revision_with_its_own_deployment(
    changed: dict[str, Any],
) -> None:
    before, after = sample_pool("sim"), sample_pool("sim", **changed)
    assert revision_of(after).name != revision_of(before).name
    for role in ("prefill", "decode"):
        old, new = nodes(before, role), nodes(after, role)
        assert new["metadata"]["name"] != old["metadata"]["name"]
        # The old Deployment's selector does not match the new pods.
        labels = new["spec"]["template"]["metadata"]["labels"]
        assert not old["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_a_new_node_image_changes_the_revision_and_a_new_router_image_does_not() -> None:
    node = msgspec.structs.replace(IMAGES, node="registry.example/baton-node:0.2.0")
    sim = msgspec.structs.replace(IMAGES, sim="registry.example/baton-sim:0.2.0")
    router = msgspec.structs.replace(IMAGES, router="registry.example/baton-router:0.2.0")
    for name, own, foreign in (("torch", node, sim), ("sim", sim, node)):
        before = revision_of(sample_pool(name)).name
        assert revision_of(sample_pool(name, Installation(images=own))).name != before
        assert revision_of(sample_pool(name, Installation(images=foreign))).name == before
        assert revision_of(sample_pool(name, Installation(images=router))).name == before


def test_simulated_nodes_use_the_node_image_if_no_sim_image_is_configured() -> None:
    images = msgspec.structs.replace(IMAGES, sim="")
    built = nodes(sample_pool("sim", Installation(images=images)), "decode")
    assert [container["image"] for container in containers(built["spec"]["template"])] == [
        IMAGES.node
    ]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_object_has_a_unique_name_the_pool_label_and_its_pool_as_owner(name: str) -> None:
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
def test_workloads_and_services_select_exactly_their_own_pods(name: str) -> None:
    manifests = build_pool(sample_pool(name))
    pods = {pod: one["metadata"]["labels"] for pod, one in templates(manifests).items()}
    for manifest in manifests:
        selector = manifest.get("spec", {}).get("selector")
        # A budget covers the pods of all revisions.
        if selector is not None and manifest["kind"] != "PodDisruptionBudget":
            selector = selector.get("matchLabels", selector)
            chosen = [pod for pod, labels in pods.items() if selector.items() <= labels.items()]
            assert chosen == [manifest["metadata"]["name"]]


def test_the_longest_pool_name_still_gives_legal_names_and_labels() -> None:
    sample = sample_pool("sim", kvStore={"managed": {"dataInstances": 64}})
    manifests = build_pool(msgspec.structs.replace(sample, name="a" * LONGEST_POOL_NAME))
    assert {"a" * LONGEST_POOL_NAME + "-kv-data-63"} < {
        one["metadata"]["name"] for one in manifests
    }
    for manifest in manifests:
        assert len(manifest["metadata"]["name"]) <= 63
        assert max(map(len, manifest["metadata"]["labels"].values())) <= 63


@pytest.mark.parametrize("name", SAMPLES)
def test_the_grace_period_covers_the_pre_stop_sleep_and_the_drain_timeout(name: str) -> None:
    checked = set()
    for template in templates(build_pool(sample_pool(name))).values():
        pod = template["spec"]
        for container in pod["containers"]:
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
            for arg in container.get("args", ()):
                if arg.startswith("--drain-timeout="):
                    needed = sleep.get("seconds", 0) + int(arg.split("=")[1])
                    assert pod["terminationGracePeriodSeconds"] >= needed + 15
                    checked.add(template["metadata"]["labels"]["baton.dev/component"])
    assert checked == {"prefill", "decode", "router"}


@pytest.mark.parametrize("name", SAMPLES)
def test_pods_are_evicted_from_a_lost_cluster_node_after_30_seconds(name: str) -> None:
    for template in templates(build_pool(sample_pool(name))).values():
        found = {one["key"]: one["tolerationSeconds"] for one in template["spec"]["tolerations"]}
        assert found == {
            "node.kubernetes.io/not-ready": 30,
            "node.kubernetes.io/unreachable": 30,
        }


def _is_ours(container: dict[str, Any]) -> bool:
    """Return whether the operator built the container, and no podTemplate added it."""
    return container["image"] in (IMAGES.node, IMAGES.router, IMAGES.redis)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_liveness_probe_ends_a_container_in_its_first_five_minutes(name: str) -> None:
    """A container on a busy machine may need that long to report a wrong flag."""
    probed = 0
    for template in templates(build_pool(sample_pool(name))).values():
        for container in filter(_is_ours, template["spec"]["containers"]):
            assert "livenessProbe" in container
            probe = container["startupProbe"]
            assert probe["failureThreshold"] * probe["periodSeconds"] >= 300
            # A router becomes ready only after a node, so its startup probe checks /health.
            path = probe.get("httpGet", {}).get("path", "")
            assert path == {"router": "/health", "node": "/ready"}.get(container["name"], "")
            probed += 1
    assert probed >= 3


@pytest.mark.parametrize("name", SAMPLES)
def test_the_last_log_lines_of_a_failed_container_are_in_its_pod_status(name: str) -> None:
    for template in templates(build_pool(sample_pool(name))).values():
        for container in filter(_is_ours, containers(template)):
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_pods_use_the_operator_s_pull_policy_and_pull_secrets() -> None:
    installation = Installation(images=IMAGES, pull_policy="Never", pull_secrets=("one", "two"))
    for template in templates(build_pool(sample_pool("hub", installation))).values():
        assert template["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
        assert {container["imagePullPolicy"] for container in containers(template)} == {"Never"}
    for template in templates(build_pool(sample_pool("hub", INSTALLATION))).values():
        assert "imagePullSecrets" not in template["spec"]
        assert not any("imagePullPolicy" in one for one in containers(template))


RESERVED = {"podTemplate": {"metadata": {"labels": {"baton.dev/pool": "other"}}}}
TEMPLATE = {"metadata": {"annotations": {"a": "b"}}, "spec": {"nodeSelector": {"disk": "fast"}}}


@pytest.mark.parametrize(
    ("spec", "changed"),
    [
        ({"prefill": {"podTemplate": TEMPLATE}}, {"prefill"}),
        ({"decode": {"podTemplate": TEMPLATE}}, {"decode"}),
        ({"router": {"podTemplate": TEMPLATE}}, {"router"}),
        ({"kvStore": {"managed": {"podTemplate": TEMPLATE}}}, {"kv-index", "kv-data"}),
    ],
)
def test_a_pod_template_changes_its_own_pods(spec: dict[str, Any], changed: set[str]) -> None:
    found = set()
    for manifest in build_pool(sample_pool("sim", **spec)):
        template = template_of(manifest)
        if template is not None and "nodeSelector" in template["spec"]:
            assert template["metadata"]["annotations"]["a"] == "b"
            found.add(manifest["metadata"]["labels"]["baton.dev/component"])
    assert found == changed


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"prefill": RESERVED}, "spec.prefill.podTemplate.metadata.labels"),
        ({"decode": RESERVED}, "spec.decode.podTemplate.metadata.labels"),
        ({"router": RESERVED}, "spec.router.podTemplate.metadata.labels"),
        ({"kvStore": {"managed": RESERVED}}, "spec.kvStore.managed.podTemplate.metadata.labels"),
        (
            {"router": {"podTemplate": {"metadata": {"annotations": {"baton.dev/x": "y"}}}}},
            "spec.router.podTemplate.metadata.annotations",
        ),
    ],
)
def test_a_pod_template_may_not_set_the_operator_s_labels(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=rf"^{re.escape(field)}: 'baton\.dev/.*; write"):
        sample_pool("sim", **spec)


NULLS: list[tuple[dict[str, Any], str]] = [
    ({"metadata": None}, "spec.router.podTemplate.metadata"),
    ({"metadata": {"labels": None}}, "spec.router.podTemplate.metadata.labels"),
    ({"metadata": {"annotations": None}}, "spec.router.podTemplate.metadata.annotations"),
]


@pytest.mark.parametrize(("template", "field"), NULLS)
def test_a_pod_template_may_not_remove_the_operator_s_labels(
    template: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError, match=rf"^{re.escape(field)}: null would remove .*leave it out"):
        sample_pool("sim", router={"podTemplate": template})


def test_each_data_server_has_its_own_service_and_deployment() -> None:
    pool = sample_pool("sim", kvStore={"managed": {"dataInstances": 3}})
    found = [
        one
        for one in build_pool(pool)
        if one["metadata"]["labels"]["baton.dev/component"] == "kv-data"
        and one["kind"] != "NetworkPolicy"
    ]
    assert [(one["kind"], one["metadata"]["name"]) for one in found] == [
        (kind, f"demo-kv-data-{number}")
        for number in range(3)
        for kind in ("Service", "Deployment")
    ]
    for deployment in found[1::2]:
        spec = deployment["spec"]
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    hosts = [f"demo-kv-data-{number}.{pool.namespace}.svc" for number in range(3)]
    assert store_settings(pool).data_urls == tuple(f"redis://{host}:6379" for host in hosts)


def test_more_data_instances_keep_the_addresses_of_the_first_ones() -> None:
    few, many = (
        store_settings(sample_pool("sim", kvStore={"managed": {"dataInstances": count}}))
        for count in (2, 5)
    )
    assert many.data_urls[:2] == few.data_urls
    assert few.index_url == many.index_url


def router_args(**router: object) -> list[str]:
    [container] = containers(
        templates(build_pool(sample_pool("sim", router=router)))["demo-router"]
    )
    args: list[str] = container["args"]
    return args


def test_default_router_settings_add_no_flags() -> None:
    default = router_args()
    assert router_args(placement="cost") == default
    assert not [arg for arg in default if arg.startswith("--placement")]
    more = router_args(placement="least-request")
    assert {*more} - {*default} == {"--placement=least-request"}


def test_routers_prefer_different_machines_and_scaling_keeps_their_template() -> None:
    one, three = (
        templates(build_pool(sample_pool("sim", router={"replicas": count})))["demo-router"]
        for count in (1, 3)
    )
    assert one == three
    preferred = one["spec"]["affinity"]["podAntiAffinity"]
    [(_, [term])] = preferred.items()
    labels = one["metadata"]["labels"]
    chosen = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert chosen.items() <= labels.items()


def test_the_memory_limit_of_a_managed_server_exceeds_its_maxmemory() -> None:
    manifests = build_pool(sample_pool("torch"))
    servers = [pod for name, pod in templates(manifests).items() if "-kv-data-" in name]
    assert servers
    [container] = servers[0]["spec"]["containers"]
    limit = int(container["resources"]["limits"]["memory"].removesuffix("Mi")) << 20
    maxmemory = int(container["args"][container["args"].index("--maxmemory") + 1])
    assert maxmemory == 8 << 30
    assert limit >= maxmemory * 5 // 4
