"""A container's error about a flag names the field of the spec behind it."""

from __future__ import annotations

from typing import Any

import pytest

from baton_protocol.store import ROLES
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner import observations as o
from tests.support.planner.observations import condition_of, observed, status_of

KEYS = {"apiKeysSecret": {"name": "keys", "key": "keys.txt"}}


@pytest.mark.parametrize(
    ("component", "spec", "message", "field"),
    [
        ("decode", {"model": {"path": "/m"}}, "--model /m: no such folder", "model.path"),
        ("decode", {"model": {"uri": "pvc://c/m"}}, "--model /models/pvc/m: no", "model.uri"),
        ("prefill", {}, "--block-size is 7; use a power of 2", "engine.blockSize"),
        ("prefill", {}, "--dtype bfloat16 needs a newer CPU", "engine.dtype"),
        ("decode", {}, "--max-model-len is 9; raise it", "engine.maxModelLen"),
        ("decode", {"engine": {"kind": "sim", "extraArgs": ["--kv-memory=1KiB"]}},
         "--kv-memory is 1024 bytes; a KV block needs 4096", "engine.extraArgs"),
        ("decode", {"engine": {"kind": "sim", "extraArgs": ["--overcommit"]}},
         "--no-overcommit is wrong", ""),
        ("router", {"router": KEYS}, "--api-keys /etc/k, line 1", "router.apiKeysSecret"),
        ("router", {"router": {"extraArgs": ["--max-inflight=0"]}}, "--max-inflight is 0",
         "router.extraArgs"),
        ("router", {}, "--redis-index redis://kv: no", "kvStore"),
        ("decode", {}, "something else--model failed", ""),
        ("kv-index", {}, "--model", ""),
    ],
)  # fmt: skip
def test_the_condition_names_the_field_that_set_the_flag(
    component: str, spec: dict[str, Any], message: str, field: str
) -> None:
    pool = sample_pool("sim", **spec)
    broken: dict[str, Any] = {"ready": False, "problem": "ConfigInvalid", "message": message}
    index, data = (pod for pod in o.shared_pods(pool) if pod.component != "router")
    seen: dict[str, Any] = {}
    role = next((role for role in ROLES if role == component), None)
    if role is not None:
        seen[role] = o.role_pods(pool, role, **broken)
    else:
        others = {"router": o.pod("router"), "kv-index": index, "kv-data": data}
        seen["others"] = tuple(
            o.pod(name, instance=one.instance, **broken) if name == component else one
            for name, one in others.items()
        )
    kinds = {"prefill": "PrefillReady", "decode": "DecodeReady", "router": "RouterReady"}
    status = status_of(observed(pool, **seen), pool)
    found = condition_of(status, kinds.get(component, "StoreReady"))
    assert found.reason == "ConfigInvalid"
    assert found.message.endswith(f"{message}; see spec.{field}" if field else message)
