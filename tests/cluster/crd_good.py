"""Valid pools that the API server must accept.

In: nothing. Out: `GOOD`: specs, with the defaults that the server must fill in.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.cluster.crd_cases import (
    SIM,
    Spec,
    clients,
    engine,
    external,
    managed,
    model,
    prefill,
    resources,
    router,
)
from tests.cluster.crd_scaling_cases import autoscaled_spec


class Good(NamedTuple):
    """A valid pool. The spec that the server returns must contain `filled`."""

    title: str
    spec: Spec
    filled: Spec | None = None
    name: str = "demo"


DEFAULTS: Spec = {
    "engine": {"kind": "sim", "dtype": "auto", "blockSize": 16},
    "prefill": {"replicas": 1},
    "decode": {"replicas": 1},
    "router": {"replicas": 1, "service": {"type": "ClusterIP", "port": 8000}},
    "kvStore": {"sharing": "pool"},
    "handoff": "auto",
    "missingRolePolicy": "aggregate",
    "networkPolicy": {"enabled": True},
    "rollout": {"surge": 1},
    "paused": False,
}

GOOD: tuple[Good, ...] = (
    Good("simulated nodes", SIM, DEFAULTS),
    Good("roll-outs within a budget", SIM | {"rollout": {"maxDrainSeconds": 1}, "gpuBudget": 1}),
    Good("a model in the image", model(path="/models/m"), {"engine": {"kind": "torch"}}),
    Good("a model on a claim", model(uri="pvc://models/qwen/0.6B")),
    Good("a claim's root", model(uri="pvc://models")),
    Good("a model of a hub", model(uri="hf://Qwen/Qwen3-0.6B", name="qwen:0.6b")),
    Good("a hub model without an organisation", model(uri="hf://gpt2@refs/pr/1")),
    Good("empty texts", model(path="/m", uri="", name="")),
    Good(
        "a model fetched once into a claim",
        model(uri="hf://a/b@v1", secretRef={"name": "hub"}, cache={"claimName": "cache"}),
    ),
    Good("a model fetched by each pod", model(uri="hf://a/b", storage="150Gi")),
    Good(
        "a model fetched once on each node", model(uri="hf://a/b", cache={"hostPath": "/var/cache"})
    ),
    Good("a simulated model", engine(kind="sim") | model(path="/m")),
    Good(
        "extra flags",
        engine(extraArgs=["--kv-blocks=64", "--sim-decode-ms=5", "--no-x"])
        | {"router": {"extraArgs": ["--request-timeout=60"]}},
    ),
    Good("batch invariance", engine(batchInvariant=True), {"engine": {"batchInvariant": True}}),
    Good("null counts as unset", engine(maxModelLen=None) | {"prefill": None}, DEFAULTS),
    Good(
        "replica counts by an external scaler",
        prefill(replicas=2) | {"autoscaling": {"mode": "external"}},
    ),
    Good(
        "replica counts by latency targets",
        autoscaled_spec(),
        {
            "autoscaling": {
                "mode": "auto",
                "targets": {"ttftMs": 2000, "itlMs": 50, "percentile": 99},
                "prefill": {"min": 1, "max": 4},
                "scaleUp": {"stabilizationSeconds": 0, "factor": 2},
                "scaleDown": {"stabilizationSeconds": 300, "nodes": 1},
                "headroomPercent": 20,
                "staleAfterSeconds": 30,
            }
        },
    ),
    Good(
        "one automatic and one external role",
        autoscaled_spec(decode={"mode": "external"}, ratio={"min": "0.25", "max": 2}),
    ),
    Good(
        "sleep in a pool that another autoscaler scales",
        SIM | {"autoscaling": {"mode": "external", "sleepAfterSeconds": 60}},
        {"autoscaling": {"mode": "external", "sleepAfterSeconds": 60, "sleepLevel": 1}},
    ),
    Good(
        "a pool that scales to zero",
        autoscaled_spec(
            prefill={"min": 0, "max": 4},
            scaleToZeroAfterSeconds=600,
            sleepAfterSeconds=60,
            sleepLevel=2,
            schedules=[
                {
                    "days": ["Mon", "Fri"],
                    "from": "08:00",
                    "to": "18:00",
                    "timeZone": "Europe/Berlin",
                    "decode": {"min": 2},
                }
            ],
        ),
    ),
    Good("no prefill nodes", prefill(replicas=0), {"decode": {"replicas": 1}}),
    Good(
        "no prefill nodes, and none needed",
        prefill(replicas=0) | {"missingRolePolicy": "fail", "handoff": "never"},
    ),
    Good("policy queue with both roles", SIM | {"missingRolePolicy": "queue"}),
    Good(
        "a device as an extra flag",
        engine(extraArgs=["--device=cuda"], startTimeoutSeconds=10),
        {"engine": {"startTimeoutSeconds": 10}},
    ),
    Good(
        "peers by namespace and label",
        clients({"podSelector": {}, "namespaceSelector": {}}),
    ),
    Good(
        "GPUs",
        resources(
            {"cpu": 4, "memory": "16Gi"}, {"memory": "16Gi", "nvidia.com/gpu": 1, "cpu": "4000m"}
        ),
    ),
    Good(
        "a pod template, stored unchanged",
        prefill(
            podTemplate={
                "metadata": {"annotations": {"a": "b"}},
                "spec": {"nodeSelector": None, "containers": [{"name": "node", "x": [1]}]},
            }
        ),
        {
            "prefill": {
                "replicas": 1,
                "podTemplate": {
                    "metadata": {"annotations": {"a": "b"}},
                    "spec": {"nodeSelector": None, "containers": [{"name": "node", "x": [1]}]},
                },
            }
        },
    ),
    Good(
        "an ingress",
        router(ingress={"host": "*.example.com", "className": "nginx", "tlsSecretName": "tls"}),
    ),
    Good(
        "a route",
        router(
            httpRoute={
                "parentRefs": [{"name": "gate", "namespace": "edge", "sectionName": "https"}],
                "hostnames": ["llm.example.com"],
            }
        ),
    ),
    Good(
        "a LoadBalancer service",
        router(service={"type": "LoadBalancer", "annotations": {"lb": "internal"}}),
        {"router": {"service": {"type": "LoadBalancer", "port": 8000}}},
    ),
    Good(
        "a managed store",
        managed(),
        {"kvStore": {"managed": {"memory": "1Gi", "dataInstances": 1}}},
    ),
    Good("the smallest store with the most instances", managed(memory="64Mi", dataInstances=64)),
    Good(
        "servers' resources",
        managed(
            memory="2Gi",
            indexResources={"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}},
            dataResources={"requests": {"cpu": 1}, "limits": {"cpu": 2, "memory": "2049Mi"}},
        ),
    ),
    Good(
        "a store size in bytes",
        managed(memory=1 << 30),
        {"kvStore": {"managed": {"memory": 1 << 30}}},
    ),
    Good(
        "an external store",
        external("rediss://[fd00::1]:6380/2", secretRef={"name": "l"}, caSecretRef={"name": "ca"}),
    ),
    Good("one host, two servers", external("redis://kv-0:6379/1", ["redis://kv-0:6380/1"])),
    Good(
        "clients by label",
        clients({"podSelector": {"matchLabels": {"a": "b"}}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}),
    ),
    Good(
        "API keys and shared KV",
        router(apiKeysSecret={"name": "tenants", "key": "api-keys"}),
        {"kvStore": {"sharing": "pool"}},
    ),
    Good(
        "API keys and KV per tenant",
        router(apiKeysSecret={"name": "tenants", "key": "keys_1.txt"})
        | {"kvStore": {"sharing": "tenant"}},
    ),
    Good(
        "a ratio, and windows, that the bounds just allow",
        SIM
        | {
            "autoscaling": {
                "mode": "auto",
                "prefill": {"min": 1, "max": 7},
                "decode": {"min": 1, "max": 10},
                "ratio": {"min": "0.7", "max": "0.7"},
                "schedules": [
                    {"from": "08:00", "to": "18:00", "decode": {"min": 10}, "prefill": {"min": 7}},
                    {"from": "18:00", "to": "08:00", "decode": {"max": 1}, "prefill": {"max": 1}},
                ],
            }
        },
    ),
    Good(
        "a role of an external autoscaler, whose bounds count for nothing",
        SIM
        | {
            "autoscaling": {
                "mode": "auto",
                "prefill": {"max": 2},
                "decode": {"mode": "external", "min": 3},
                "ratio": {"min": "4"},
                "schedules": [{"from": "08:00", "to": "18:00", "decode": {"max": 1}}],
            }
        },
    ),
    Good("the most nodes", SIM | {"decode": {"replicas": 10_000}, "router": {"replicas": 1_000}}),
    Good("the longest name", SIM, name="a" * 40),
)
