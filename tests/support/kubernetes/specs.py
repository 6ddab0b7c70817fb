"""Specs of pools for a small cluster, and the flags by which `baton up` serves the same.

In: what a test wants beside one small node of each role. Out: an InferencePool's `spec`, to be
changed freely. All hand every prompt over, in chunks of one block, so that KV really travels.
Where pods are to run is said by parts of pod templates.
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
    """Simulated nodes. Times change no token."""
    times = {"decode-ms": decode_ms, "prefill-ms-per-token": prefill_ms_per_token}
    words = [f"--sim-{name}={value}" for name, value in times.items() if value]
    return _spec({"kind": "sim", "chunkBlocks": 1, "extraArgs": words}, {}, prefill, decode)


def torch_spec(model: str, pod_template: Json) -> Json:
    """Real ones on CPUs. `pod_template` brings Python's environment and the model's folder."""
    engine = {"kind": "torch", "dtype": "float32", "chunkBlocks": 1, "extraArgs": TORCH_WORDS}
    spec = _spec(engine, {"podTemplate": pod_template}, 1, 1)
    return {**spec, "model": {"path": model, "name": Path(model).name}}


TORCH_WORDS = ["--threads=1", "--kv-blocks=400"]


def torch_up(model: Path) -> tuple[str, ...]:
    words = ("--model", str(model), "--dtype", "float32", "--threads", "1", "--kv-blocks", "400")
    return (*words, *SAME)


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
    """The role's pods evenly, as far as that can be."""
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
    """Elsewhere, while that one is gone."""
    term = {"matchExpressions": [{"key": HOSTS, "operator": "In", "values": [host]}]}
    wished = [{"weight": 100, "preference": term}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": wished}}
    return {"spec": {"affinity": affinity}}
