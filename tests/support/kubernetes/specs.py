"""Specs of pools for a small cluster, and `baton up` flags that serve the same.

In: a test's deviations from one small node per role. Out: an InferencePool's `spec`, which the
caller may change. All pools hand off every prompt, in chunks of one block, so that nodes really
exchange KV. Helpers build the parts of pod templates that choose where pods run.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.clients.http import Json

NODE_MEMORY = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
# Many pools share two cores here.
LITTLE = {"requests": {"cpu": "50m", "memory": "128Mi"}}
LITTLE_CPU = {"requests": {"cpu": "50m"}}
SAME = ("--prefill", "1", "--decode", "1", "--handoff", "always", "--chunk-blocks", "1")
SIM_UP = ("--engine", "sim", *SAME)
HOSTS = "kubernetes.io/hostname"


def sim_spec(
    *, prefill: int = 1, decode: int = 1, decode_ms: int = 0, prefill_ms_per_token: int = 0
) -> Json:
    """A spec with simulated nodes. The times do not affect tokens."""
    times = {"decode-ms": decode_ms, "prefill-ms-per-token": prefill_ms_per_token}
    arguments = [f"--sim-{name}={value}" for name, value in times.items() if value]
    return _spec({"kind": "sim", "chunkBlocks": 1, "extraArgs": arguments}, {}, prefill, decode)


def torch_spec(model: str, pod_template: Json) -> Json:
    """A spec with torch engines on CPUs, whose answers depend on no batch. `pod_template` mounts
    the Python environment and the model's folder."""
    engine = {
        **{"kind": "torch", "dtype": "bfloat16", "batchInvariant": True},
        **{"chunkBlocks": 1, "extraArgs": TORCH_ARGUMENTS},
    }
    spec = _spec(engine, {"podTemplate": pod_template}, 1, 1)
    return {**spec, "model": {"path": model, "name": Path(model).name}}


TORCH_ARGUMENTS = ["--threads=1", "--kv-blocks=400"]


def torch_up(model: Path) -> tuple[str, ...]:
    exact = ("--model", str(model), "--dtype", "bfloat16", "--batch-invariant", "on")
    return (*exact, "--threads", "1", "--kv-blocks", "400", *SAME)


def _spec(engine: Json, role: Json, prefill: int, decode: int) -> Json:
    return {
        "engine": engine,
        "handoff": "always",
        "prefill": {"replicas": prefill, "resources": NODE_MEMORY, **role},
        "decode": {"replicas": decode, "resources": NODE_MEMORY, **role},
        "router": {"resources": LITTLE},
        "kvStore": {
            "managed": {
                "memory": "64Mi",
                "indexResources": LITTLE_CPU,
                "dataResources": LITTLE_CPU,
            }
        },
    }


# --- on which of the cluster's nodes --------------------------------------------------------------


def spread(role: str) -> Json:
    """Spread the role's pods evenly over the cluster's nodes if possible."""
    constraint = {
        "maxSkew": 1,
        "topologyKey": HOSTS,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {"baton.dev/component": role}},
    }
    return {"spec": {"topologySpreadConstraints": [constraint]}}


def only_on(host: str) -> Json:
    return {"spec": {"nodeSelector": {HOSTS: host}}}


def rather_on(host: str) -> Json:
    """Prefer `host`, but allow other nodes while it is gone."""
    term = {"matchExpressions": [{"key": HOSTS, "operator": "In", "values": [host]}]}
    preferred = [{"weight": 100, "preference": term}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return {"spec": {"affinity": affinity}}
