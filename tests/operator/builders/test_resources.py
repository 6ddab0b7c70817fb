"""Resources, writable storage and placement of the pool's containers."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.api.resources import quantity_bytes
from baton_operator.builders import build_pool
from tests.support.kubernetes.documents import ROOT
from tests.support.kubernetes.manifests import (
    SAMPLES,
    containers,
    sample_pool,
    template_of,
    templates,
)

Spec = dict[str, Any]
OWN = ("node", "router", "redis", "fetch-model")


def pods(spec: Spec, name: str = "sim") -> dict[str, dict[str, Any]]:
    """Return the pod templates by component; several data servers appear as the last one."""
    built = build_pool(sample_pool(name, **spec))
    return {
        one["metadata"]["labels"]["baton.dev/component"]: template
        for one in built
        if (template := template_of(one)) is not None
    }


def resources_of(spec: Spec, component: str) -> dict[str, Any]:
    """Return the resources of the component's own container."""
    [container] = pods(spec)[component]["spec"]["containers"]
    found: dict[str, Any] = container.get("resources", {})
    return found


def tmp_size(template: dict[str, Any]) -> str:
    [tmp] = [one for one in template["spec"]["volumes"] if one["name"] == "tmp"]
    size: str = tmp["emptyDir"]["sizeLimit"]
    return size


def server_resources(field: str, resources: Spec) -> Spec:
    return {"kvStore": {"managed": {field: resources}}}


# --- requests and limits --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_every_container_has_cpu_and_memory(name: str) -> None:
    """Kubernetes evicts pods without them first."""
    for template in templates(build_pool(sample_pool(name))).values():
        for container in containers(template):
            if container["name"] in OWN:
                resources = container["resources"]
                named = resources["requests"].keys() | resources["limits"].keys()
                assert {"cpu", "memory"} <= named


def test_a_router_requests_half_a_core() -> None:
    assert resources_of({}, "router")["requests"]["cpu"] == "500m"


NAMED: dict[str, tuple[Spec, str, Spec, Spec]] = {
    "a router's CPU": (
        {"router": {"resources": {"requests": {"cpu": 2}}}},
        "router",
        {"cpu": "2", "memory": "512Mi", "ephemeral-storage": "64Mi"},
        {"ephemeral-storage": "1Gi"},
    ),
    "a router's limit": (
        {"router": {"resources": {"limits": {"cpu": "100m", "memory": "256Mi"}}}},
        "router",
        {"ephemeral-storage": "64Mi"},
        {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "1Gi"},
    ),
    "the index' CPU": (
        server_resources("indexResources", {"requests": {"cpu": "1500m"}}),
        "kv-index",
        {"cpu": "1500m", "memory": "224Mi", "ephemeral-storage": "64Mi"},
        {"memory": "224Mi", "ephemeral-storage": "1Gi"},
    ),
    "the data servers' CPU": (
        server_resources("dataResources", {"requests": {"cpu": 3}, "limits": {"cpu": 4}}),
        "kv-data",
        {"cpu": "3", "memory": "1344Mi", "ephemeral-storage": "64Mi"},
        {"cpu": "4", "memory": "1344Mi", "ephemeral-storage": "1Gi"},
    ),
    "a data server's memory": (
        server_resources("dataResources", {"requests": {"memory": "9Gi"}}),
        "kv-data",
        {"cpu": "500m", "memory": "9Gi", "ephemeral-storage": "64Mi"},
        {"ephemeral-storage": "1Gi"},
    ),
    "a node's": (
        {"decode": {"resources": {"requests": {"cpu": 4}, "limits": {"memory": "8Gi"}}}},
        "decode",
        {"cpu": "4", "ephemeral-storage": "512Mi"},
        {"memory": "8Gi", "ephemeral-storage": "5120Mi"},
    ),
    "a node's GPU": (
        {"decode": {"resources": {"limits": {"nvidia.com/gpu": 1}}}},
        "decode",
        {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "512Mi"},
        {"nvidia.com/gpu": "1", "ephemeral-storage": "5120Mi"},
    ),
    "a node's storage": (
        {"decode": {"resources": {"limits": {"ephemeral-storage": "50Gi"}}}},
        "decode",
        {"cpu": "1", "memory": "1Gi"},
        {"ephemeral-storage": "50Gi"},
    ),
}


@pytest.mark.parametrize(("spec", "component", "requests", "limits"), NAMED.values(), ids=NAMED)
def test_resources_in_the_spec_replace_their_defaults_and_no_others(
    spec: Spec, component: str, requests: Spec, limits: Spec
) -> None:
    found = resources_of(spec, component)
    assert (found.get("requests", {}), found["limits"]) == (requests, limits)


@pytest.mark.parametrize(("of", "other"), [("index", "kv-data"), ("data", "kv-index")])
def test_index_and_data_servers_have_separate_resources(of: str, other: str) -> None:
    spec = server_resources(f"{of}Resources", {"requests": {"cpu": "77m"}})
    assert resources_of(spec, f"kv-{of}")["requests"]["cpu"] == "77m"
    assert resources_of(spec, other) == resources_of({}, other)


def test_the_docs_list_the_default_resources() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    section = text.split("\n## Resources of pods\n")[1].split("\n\n- ")[0]
    documented = {
        cells[0]: cells[2:]
        for row in section.splitlines()
        if row.startswith("| ") and len(cells := row.strip("| ").split(" | ")) == 5
    }
    rows = {
        "node": "decode",
        "router": "router",
        "index Redis": "kv-index",
        "data Redis": "kv-data",
    }
    for row, component in rows.items():
        found, (cpu, memory, storage) = resources_of({}, component), documented[row]
        requests, limits = found["requests"], found["limits"]
        assert cpu.split()[0] == requests["cpu"]
        assert ("and no more" in memory) == ("memory" in limits)
        if component != "kv-data":  # it follows kvStore.managed.memory
            assert memory.replace(",", " ").split()[0] == requests["memory"]
        least, most = storage.split(";")[0].split(", at most ")
        request, limit = requests["ephemeral-storage"], limits["ephemeral-storage"]
        assert (least, quantity_bytes(most)) == (request, quantity_bytes(limit))


# --- writable storage -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_writable_storage_is_requested_and_limited(name: str) -> None:
    for template in templates(build_pool(sample_pool(name))).values():
        for volume in template["spec"]["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), volume
        for container in containers(template):
            if container["name"] in OWN:
                resources = container["resources"]
                assert "ephemeral-storage" in resources["requests"]
                assert "ephemeral-storage" in resources["limits"]


def test_the_size_of_tmp_follows_the_limit_of_its_container() -> None:
    default = {name: tmp_size(template) for name, template in pods({}).items()}
    assert default == {
        "prefill": "5120Mi",
        "decode": "5120Mi",
        "router": "1Gi",
        "kv-index": "1Gi",
        "kv-data": "1Gi",
    }
    more = {"resources": {"limits": {"ephemeral-storage": "40Gi"}}}
    spec = {
        "prefill": more,
        "router": more,
        "kvStore": {"managed": {"dataResources": more["resources"]}},
    }
    found = {name: tmp_size(template) for name, template in pods(spec).items()}
    assert found == default | {"prefill": "40Gi", "router": "40Gi", "kv-data": "40Gi"}


# --- placement ------------------------------------------------------------------------------------


def test_interchangeable_pods_prefer_different_machines() -> None:
    spec = {"kvStore": {"managed": {"dataInstances": 2}}}
    found = pods(spec)
    for component in ("prefill", "decode", "router", "kv-data"):
        labels = found[component]["metadata"]["labels"]
        affinity = found[component]["spec"]["affinity"]
        # A required rule would keep a pool from running on one machine.
        assert affinity.keys() == {"podAntiAffinity"}
        [(kind, [preference])] = affinity["podAntiAffinity"].items()
        assert kind == "preferredDuringSchedulingIgnoredDuringExecution"
        term = preference["podAffinityTerm"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        # Only routers are replaced within one Deployment, so only their term must ignore the pods
        # of the old template.
        keys = ["pod-template-hash"] if component == "router" else None
        assert term.get("matchLabelKeys") == keys
        chosen = term["labelSelector"]["matchLabels"]
        assert chosen.items() <= labels.items()
        assert chosen["baton.dev/component"] == component
        # Each data server has its own Deployment, and the term must match all of them.
        assert "baton.dev/instance" not in chosen
    # The only index server may share a machine: data servers are of no use without it.
    assert "affinity" not in found["kv-index"]["spec"]


def test_new_nodes_may_share_machines_with_nodes_of_an_old_revision() -> None:
    old, new = (
        pods({"decode": {"podTemplate": {"metadata": {"annotations": {"a": text}}}}})["decode"]
        for text in ("1", "2")
    )
    [preference] = new["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    chosen = preference["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert not chosen.items() <= old["metadata"]["labels"].items()


def test_a_user_s_affinity_replaces_only_the_kinds_that_it_names() -> None:
    rule: Spec = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    replaced = {"spec": {"affinity": {"podAntiAffinity": rule}}}
    added: Spec = {"spec": {"affinity": {"nodeAffinity": {}}}}
    spec = {"prefill": {"podTemplate": replaced}, "decode": {"podTemplate": added}}
    found = pods(spec)
    assert found["prefill"]["spec"]["affinity"] == {"podAntiAffinity": rule}
    default = pods({})["decode"]["spec"]["affinity"]
    assert found["decode"]["spec"]["affinity"].keys() == {*default, "nodeAffinity"}


# --- start-up deadlines ---------------------------------------------------------------------------


def deadlines(spec: Spec, name: str = "sim") -> dict[str, int]:
    return {
        one["metadata"]["labels"]["baton.dev/component"]: one["spec"]["progressDeadlineSeconds"]
        for one in build_pool(sample_pool(name, **spec))
        if template_of(one) is not None
    }


SIM: Spec = {"kind": "sim", "chunkBlocks": 1}
HUB: Spec = {"uri": "hf://org/name"}
PLACE, REDIS, ROUTER = 600, 300, 300
DEADLINES: dict[str, tuple[Spec, int]] = {
    "the default": ({}, 1800),
    "a configured timeout": ({"engine": SIM | {"startTimeoutSeconds": 4000}}, 4000),
    "a short timeout": ({"engine": SIM | {"startTimeoutSeconds": 10}}, 10),
    "a model to fetch": ({"engine": {"kind": "torch"}, "model": HUB}, 1800 + 2048),
    "a large model": (
        {"engine": {"kind": "torch"}, "model": HUB | {"storage": "200Gi"}},
        1800 + 20480,
    ),
    "a model to fetch without weights": ({"model": HUB}, 1800 + 103),
    "a shared cache": ({"model": HUB | {"cache": {"claimName": "c"}}}, 1800 + 7200),
    "a claim": ({"model": {"uri": "pvc://models/x"}}, 1800),
    "a startup probe in the podTemplate": (
        {
            role: {
                "podTemplate": {
                    "spec": {
                        "containers": [
                            {
                                "name": "node",
                                "startupProbe": {
                                    "initialDelaySeconds": 30,
                                    "periodSeconds": 10,
                                    "failureThreshold": 500,
                                },
                            }
                        ]
                    }
                }
            }
            for role in ("prefill", "decode")
        },
        5030,
    ),
}


@pytest.mark.parametrize(("spec", "start_s"), DEADLINES.values(), ids=DEADLINES)
def test_the_progress_deadline_covers_the_longest_start_of_a_pod(spec: Spec, start_s: int) -> None:
    assert deadlines(spec) == {
        "prefill": PLACE + start_s,
        "decode": PLACE + start_s,
        # A router becomes ready only after a node.
        "router": PLACE + ROUTER + PLACE + start_s,
        "kv-index": PLACE + REDIS,
        "kv-data": PLACE + REDIS,
    }


@pytest.mark.parametrize("value", ["soon", 1 << 40, None, {}])
def test_an_invalid_startup_probe_still_gives_a_valid_deadline(value: Any) -> None:
    probe = {"name": "router", "startupProbe": {"failureThreshold": value}}
    spec = {"router": {"podTemplate": {"spec": {"containers": [probe]}}}}
    assert 0 < deadlines(spec)["router"] < 1 << 31
