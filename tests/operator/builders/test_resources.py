"""Resources, writable storage and placement of the pool's containers."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.api.fields import quantity_bytes
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
    """The pods' templates by component; of several data servers the last one."""
    built = build_pool(sample_pool(name, **spec))
    return {
        one["metadata"]["labels"]["baton.dev/component"]: template
        for one in built
        if (template := template_of(one)) is not None
    }


def given(spec: Spec, component: str) -> dict[str, Any]:
    """The resources of the component's own container."""
    [container] = pods(spec)[component]["spec"]["containers"]
    found: dict[str, Any] = container.get("resources", {})
    return found


def scratch_of(template: dict[str, Any]) -> str:
    [tmp] = [one for one in template["spec"]["volumes"] if one["name"] == "tmp"]
    size: str = tmp["emptyDir"]["sizeLimit"]
    return size


def server(of: str, resources: Spec) -> Spec:
    return {"kvStore": {"managed": {of: resources}}}


# --- what is promised to them ---------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_no_pod_is_the_first_to_be_evicted(name: str) -> None:
    """As those are that ask for nothing."""
    for template in templates(build_pool(sample_pool(name))).values():
        for container in containers(template):
            if container["name"] in OWN:
                asked = container["resources"]
                named = asked["requests"].keys() | asked["limits"].keys()
                assert {"cpu", "memory"} <= named


def test_each_worker_of_a_router_is_promised_half_a_core() -> None:
    found = [given({"router": {"workers": count}}, "router")["requests"]["cpu"] for count in (1, 4)]
    assert found == ["500m", "2000m"]


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
        server("indexResources", {"requests": {"cpu": "1500m"}}),
        "kv-index",
        {"cpu": "1500m", "memory": "224Mi", "ephemeral-storage": "64Mi"},
        {"memory": "224Mi", "ephemeral-storage": "1Gi"},
    ),
    "the data servers' CPU": (
        server("dataResources", {"requests": {"cpu": 3}, "limits": {"cpu": 4}}),
        "kv-data",
        {"cpu": "3", "memory": "1344Mi", "ephemeral-storage": "64Mi"},
        {"cpu": "4", "memory": "1344Mi", "ephemeral-storage": "1Gi"},
    ),
    "a data server's memory": (
        server("dataResources", {"requests": {"memory": "9Gi"}}),
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
def test_a_resource_that_the_user_names_is_theirs_and_the_others_keep_their_defaults(
    spec: Spec, component: str, requests: Spec, limits: Spec
) -> None:
    found = given(spec, component)
    assert (found.get("requests", {}), found["limits"]) == (requests, limits)


@pytest.mark.parametrize(("of", "other"), [("index", "kv-data"), ("data", "kv-index")])
def test_index_and_data_servers_have_resources_of_their_own(of: str, other: str) -> None:
    spec = server(f"{of}Resources", {"requests": {"cpu": "77m"}})
    assert given(spec, f"kv-{of}")["requests"]["cpu"] == "77m"
    assert given(spec, other) == given({}, other)


def test_the_documents_tell_the_defaults() -> None:
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    section = text.split("\n## Resources of pods\n")[1].split("\n\n- ")[0]
    told = {
        words[0]: words[2:]
        for row in section.splitlines()
        if row.startswith("| ") and len(words := row.strip("| ").split(" | ")) == 5
    }
    rows = {
        "node": "decode",
        "router": "router",
        "index Redis": "kv-index",
        "data Redis": "kv-data",
    }
    for row, component in rows.items():
        found, (cpu, memory, storage) = given({}, component), told[row]
        requests, limits = found["requests"], found["limits"]
        assert cpu.split()[0] == requests["cpu"]
        assert ("and no more" in memory) == ("memory" in limits)
        if component != "kv-data":  # it follows kvStore.managed.memory
            assert memory.replace(",", " ").split()[0] == requests["memory"]
        least, most = storage.split(";")[0].split(", at most ")
        asked, allowed = requests["ephemeral-storage"], limits["ephemeral-storage"]
        assert (least, quantity_bytes(most)) == (asked, quantity_bytes(allowed))


# --- what they may write --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_what_a_pod_may_write_is_asked_for_and_bounded(name: str) -> None:
    for template in templates(build_pool(sample_pool(name))).values():
        for volume in template["spec"]["volumes"]:
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), volume
        for container in containers(template):
            if container["name"] in OWN:
                asked = container["resources"]
                assert "ephemeral-storage" in asked["requests"]
                assert "ephemeral-storage" in asked["limits"]


def test_tmp_grows_with_the_limit_of_its_container() -> None:
    default = {name: scratch_of(template) for name, template in pods({}).items()}
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
    found = {name: scratch_of(template) for name, template in pods(spec).items()}
    assert found == default | {"prefill": "40Gi", "router": "40Gi", "kv-data": "40Gi"}


# --- where they stand -----------------------------------------------------------------------------


def test_pods_that_stand_in_for_each_other_prefer_different_machines() -> None:
    spec = {"kvStore": {"managed": {"dataInstances": 2}}}
    found = pods(spec)
    for component in ("prefill", "decode", "router", "kv-data"):
        labels = found[component]["metadata"]["labels"]
        affinity = found[component]["spec"]["affinity"]
        # Nothing is required: a pool also runs on one machine.
        assert affinity.keys() == {"podAntiAffinity"}
        [(kind, [preference])] = affinity["podAntiAffinity"].items()
        assert kind == "preferredDuringSchedulingIgnoredDuringExecution"
        term = preference["podAffinityTerm"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        # Routers alone are replaced within one Deployment: those that go do not count. Each data
        # server has a Deployment, and so a hash, of its own.
        keys = ["pod-template-hash"] if component == "router" else None
        assert term.get("matchLabelKeys") == keys
        chosen = term["labelSelector"]["matchLabels"]
        assert chosen.items() <= labels.items()
        assert chosen["baton.dev/component"] == component
        # Each data server has a Deployment of its own.
        assert "baton.dev/instance" not in chosen
    # There is one index, and without it the data servers are of no use.
    assert "affinity" not in found["kv-index"]["spec"]


def test_nodes_of_another_revision_are_not_in_the_way_of_the_new_ones() -> None:
    old, new = (
        pods({"decode": {"podTemplate": {"metadata": {"annotations": {"a": text}}}}})["decode"]
        for text in ("1", "2")
    )
    [preference] = new["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    chosen = preference["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert not chosen.items() <= old["metadata"]["labels"].items()


def test_a_users_affinity_replaces_ours_and_leaves_what_it_does_not_name() -> None:
    where: Spec = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    replaced = {"spec": {"affinity": {"podAntiAffinity": where}}}
    beside: Spec = {"spec": {"affinity": {"nodeAffinity": {}}}}
    spec = {"prefill": {"podTemplate": replaced}, "decode": {"podTemplate": beside}}
    found = pods(spec)
    assert found["prefill"]["spec"]["affinity"] == {"podAntiAffinity": where}
    ours = pods({})["decode"]["spec"]["affinity"]
    assert found["decode"]["spec"]["affinity"].keys() == {*ours, "nodeAffinity"}


# --- how long they may take to start --------------------------------------------------------------


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
    "a time said": ({"engine": SIM | {"startTimeoutSeconds": 4000}}, 4000),
    "a short time": ({"engine": SIM | {"startTimeoutSeconds": 10}}, 10),
    "a model to fetch": ({"engine": {"kind": "torch"}, "model": HUB}, 1800 + 2048),
    "a large model": (
        {"engine": {"kind": "torch"}, "model": HUB | {"storage": "200Gi"}},
        1800 + 20480,
    ),
    "what a simulated engine fetches": ({"model": HUB}, 1800 + 103),
    "a shared cache": ({"model": HUB | {"cache": {"claimName": "c"}}}, 1800 + 7200),
    "a claim": ({"model": {"uri": "pvc://models/x"}}, 1800),
    "a probe of the podTemplate": (
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
def test_a_deployment_waits_as_long_as_its_pods_may_take_to_start(spec: Spec, start_s: int) -> None:
    assert deadlines(spec) == {
        "prefill": PLACE + start_s,
        "decode": PLACE + start_s,
        # It is ready only once a node is.
        "router": PLACE + ROUTER + PLACE + start_s,
        "kv-index": PLACE + REDIS,
        "kv-data": PLACE + REDIS,
    }


@pytest.mark.parametrize("value", ["soon", 1 << 40, None, {}])
def test_a_probe_that_kubernetes_refuses_is_still_built(value: Any) -> None:
    probe = {"name": "router", "startupProbe": {"failureThreshold": value}}
    spec = {"router": {"podTemplate": {"spec": {"containers": [probe]}}}}
    assert 0 < deadlines(spec)["router"] < 1 << 31
