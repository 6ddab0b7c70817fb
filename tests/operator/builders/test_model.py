"""The model of a node, the time it gets to load it, and its device."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.builders import build_pool
from tests.support.kubernetes.manifests import sample_pool, templates


def node_template(spec: dict[str, Any], role: str = "decode") -> dict[str, Any]:
    built = templates(build_pool(sample_pool("torch", **spec)))
    [found] = [template for name, template in built.items() if name.startswith(f"qwen-{role}-")]
    return found


def node(spec: dict[str, Any], role: str = "decode") -> dict[str, Any]:
    [container] = node_template(spec, role)["spec"]["containers"]
    assert container["name"] == "node"
    return dict(container)


def volume(template: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [one for one in template["spec"]["volumes"] if one["name"] == name]
    return dict(found)


def mount(container: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [one for one in container["volumeMounts"] if one["name"] == name]
    return dict(found)


def test_a_model_path_adds_no_volume_and_no_init_container() -> None:
    template = node_template({"model": {"path": "/models/x"}})
    assert [one["name"] for one in template["spec"]["volumes"]] == ["tmp"]
    assert "initContainers" not in template["spec"]
    assert "--model=/models/x" in node({"model": {"path": "/models/x"}})["args"]


@pytest.mark.parametrize(
    ("uri", "folder"),
    [
        ("pvc://models/a/b", "/models/pvc/a/b"),
        ("pvc://models/a/", "/models/pvc/a"),
        ("pvc://models", "/models/pvc"),
    ],
)
def test_a_claim_is_mounted_read_only(uri: str, folder: str) -> None:
    spec = {"model": {"uri": uri}}
    claim = {"claimName": "models", "readOnly": True}
    assert volume(node_template(spec), "model") == {"name": "model", "persistentVolumeClaim": claim}
    container = node(spec)
    assert f"--model={folder}" in container["args"]
    assert mount(container, "model") == {
        "name": "model",
        "mountPath": "/models/pvc",
        "readOnly": True,
    }


@pytest.mark.parametrize(
    ("cache", "source"),
    [
        ({}, {"emptyDir": {"sizeLimit": "20480Mi"}}),
        ({"claimName": "big"}, {"persistentVolumeClaim": {"claimName": "big"}}),
        ({"hostPath": "/var/x"}, {"hostPath": {"path": "/var/x", "type": "DirectoryOrCreate"}}),
    ],
)
def test_a_hub_model_is_fetched_before_the_node_starts(
    cache: dict[str, str], source: dict[str, Any]
) -> None:
    spec = {"model": {"uri": "hf://org/name@v1", **({"cache": cache} if cache else {})}}
    template = node_template(spec)
    assert volume(template, "model") == {"name": "model", **source}
    [fetch] = template["spec"]["initContainers"]
    assert fetch["args"][:3] == ["model", "fetch", "hf://org/name@v1"]
    # The init container writes to the volume; the node only reads it.
    assert mount(fetch, "model") == {"name": "model", "mountPath": "/models/hub"}
    assert mount(node(spec), "model")["readOnly"] is True
    assert "--model=/models/hub/org--name@v1" in node(spec)["args"]


def test_only_the_fetching_container_gets_the_hub_token() -> None:
    spec = {"model": {"uri": "hf://org/name", "secretRef": {"name": "hub"}}}
    [fetch] = node_template(spec)["spec"]["initContainers"]
    token = {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}},
    }
    assert token in fetch["env"]
    assert token not in node(spec)["env"]


@pytest.mark.parametrize(("kind", "no_weights"), [("torch", False), ("sim", True)])
def test_a_simulated_engine_fetches_its_model_without_weights(kind: str, no_weights: bool) -> None:
    template = node_template({"model": {"uri": "hf://org/name"}, "engine": {"kind": kind}})
    [fetching] = template["spec"]["initContainers"]
    assert ("--no-weights" in fetching["args"]) is no_weights


def test_the_fetching_container_has_the_node_s_cpu_and_memory_limits_but_no_devices() -> None:
    limits = {"memory": "8Gi", "cpu": 2, "nvidia.com/gpu": 1}
    role = {"resources": {"limits": limits, "requests": {"nvidia.com/gpu": 1}}}
    spec = {"model": {"uri": "hf://org/name", "cache": {"claimName": "c"}}, "decode": role}
    [fetch] = node_template(spec)["spec"]["initContainers"]
    assert fetch["resources"] == {
        "requests": {"ephemeral-storage": "512Mi"},
        "limits": {"memory": "8Gi", "cpu": "2", "ephemeral-storage": "5120Mi"},
    }


@pytest.mark.parametrize(
    ("model", "kind", "mi"),
    [
        ({}, "torch", 20 << 10),
        ({}, "sim", 1 << 10),
        ({"storage": "150Gi"}, "torch", 150 << 10),
        ({"storage": 5000000}, "sim", 5),
        ({"cache": {"claimName": "c"}}, "torch", 0),
        ({"cache": {"hostPath": "/c"}}, "torch", 0),
    ],
)
def test_storage_for_a_model_in_the_pod_is_requested_and_limited(
    model: dict[str, Any], kind: str, mi: int
) -> None:
    spec = {"model": {"uri": "hf://org/name", **model}, "engine": {"kind": kind}}
    template = node_template(spec)
    [fetch], [container] = template["spec"]["initContainers"], template["spec"]["containers"]
    storage = {
        name: amounts["ephemeral-storage"] for name, amounts in container["resources"].items()
    }
    assert storage == {"requests": f"{512 + mi}Mi", "limits": f"{5120 + mi}Mi"}
    for name, amounts in fetch["resources"].items():
        assert amounts["ephemeral-storage"] == storage[name]
    # The model does not take space from /tmp.
    assert volume(template, "tmp")["emptyDir"] == {"sizeLimit": "5120Mi"}
    # With --room, a model that is too large fails before the fetch instead of being evicted in it.
    room = [arg for arg in fetch["args"] if arg.startswith("--room")]
    if mi:
        assert volume(template, "model")["emptyDir"] == {"sizeLimit": f"{mi}Mi"}
        assert room == [f"--room={mi}MiB"]
    else:
        assert "emptyDir" not in volume(template, "model")
        assert room == []


START: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "no resources": ({}, {}, 1800),
    "a small limit": ({}, {"limits": {"memory": "16Gi"}}, 600),
    "no memory": ({}, {"limits": {"memory": 0}}, 600),
    "a large limit": ({}, {"limits": {"memory": "1Ti"}}, 120 + 20971),
    "a request only": ({}, {"requests": {"memory": "1Ti"}}, 1800),
    "a GPU": ({}, {"limits": {"memory": "1Ti", "nvidia.com/gpu": 1}}, 1800),
    "a configured timeout": ({"startTimeoutSeconds": 31}, {"limits": {"memory": "1Ti"}}, 31),
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("engine", "resources", "seconds"), START.values(), ids=START)
def test_the_start_timeout_allows_for_two_reads_of_the_model(
    role: str, engine: dict[str, Any], resources: dict[str, Any], seconds: int
) -> None:
    container = node({"engine": engine, role: {"resources": resources}}, role)
    assert f"--start-timeout={seconds}" in container["args"]
    probe = container["startupProbe"]
    assert probe["httpGet"]["path"] == "/ready"
    budget = probe["failureThreshold"] * probe["periodSeconds"]
    assert seconds <= budget < seconds + probe["periodSeconds"]


@pytest.mark.parametrize(
    ("limits", "engine", "flag"),
    [
        ({"nvidia.com/gpu": 1}, "torch", "--device=cuda"),
        ({"nvidia.com/mig-3g.20gb": 1}, "torch", "--device=cuda"),
        ({"amd.com/gpu": 8}, "torch", "--device=cuda"),
        ({"nvidia.com/gpu": 0}, "torch", None),
        ({"memory": "1Gi"}, "torch", None),
        ({"nvidia.com/gpu": 1}, "sim", None),
    ],
)
def test_a_node_with_a_gpu_limit_runs_on_cuda(
    limits: dict[str, int], engine: str, flag: str | None
) -> None:
    spec = {"decode": {"resources": {"limits": limits}}, "engine": {"kind": engine}}
    devices = [arg for arg in node(spec)["args"] if arg.startswith("--device")]
    assert devices == ([flag] if flag else [])


def test_a_gpu_limit_of_one_role_does_not_change_the_other() -> None:
    spec = {"prefill": {"resources": {"limits": {"nvidia.com/gpu": 1}}}, "decode": {}}
    assert "--device=cuda" in node(spec, "prefill")["args"]
    assert "--device=cuda" not in node(spec, "decode")["args"]


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"path": "/models/Qwen3-0.6B/"}, "Qwen3-0.6B"),
        ({"uri": "hf://Qwen/Qwen3-0.6B@main"}, "Qwen/Qwen3-0.6B"),
        ({"uri": "pvc://models/llama/3"}, "3"),
        ({"uri": "pvc://models/llama/3", "name": "llama"}, "llama"),
    ],
)
def test_the_served_model_name_is_configured_or_comes_from_the_source(
    model: dict[str, str], name: str
) -> None:
    pool = sample_pool("torch", model=model)
    assert pool.spec.model_name == name
    [router] = templates(build_pool(pool))["qwen-router"]["spec"]["containers"]
    assert f"--served-model-name={name}" in router["args"]


def test_the_router_gets_each_alias_of_the_model_once() -> None:
    model = {"path": "/models/m", "aliases": ["org/m", "m", "gpt-4"]}
    [router] = templates(build_pool(sample_pool("torch", model=model)))["qwen-router"]["spec"][
        "containers"
    ]
    assert "--served-model-name=m,org/m,gpt-4" in router["args"]


def test_a_simulated_pool_without_a_model_serves_the_name_sim() -> None:
    assert sample_pool("sim").spec.model_name == "sim"
