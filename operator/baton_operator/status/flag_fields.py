"""Which field of the spec a container's error is about.

In: a container's last words, which name a flag of `baton prefill`, `decode` or `router`. Out: the
field from which the operator set that flag, or "": users write fields and never see the flags.
"""

from __future__ import annotations

import re

from baton_operator.api.pool import Pool
from baton_protocol.store import ROLES

_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
_NODES = {
    "model": ("model.path", "model.uri"),
    "served-model-name": ("model.name",),
    "engine": ("engine.kind",),
    "dtype": ("engine.dtype",),
    "quantization": ("engine.quantization",),
    "speculative-config": ("engine.speculativeConfig",),
    "kv-cache-dtype": ("engine.kvCacheDtype",),
    "matmul-precision": ("engine.matmulPrecision",),
    "batch-invariant": ("engine.batchInvariant",),
    "store-codec": ("engine.storeCodec",),
    "block-size": ("engine.blockSize",),
    "chunk-blocks": ("engine.chunkBlocks",),
    "max-model-len": ("engine.maxModelLen",),
    "start-timeout": ("engine.startTimeoutSeconds",),
    "device": ("resources.limits",),
    "room": ("model.storage",),
}
_ROUTERS = {
    "api-keys": ("router.apiKeysSecret",),
    "sharing": ("kvStore.sharing",),
    "handoff": ("handoff",),
    "missing-role": ("missingRolePolicy",),
    "placement": ("router.placement",),
    "served-model-name": ("model.name",),
}
_STORE = {"redis-index": ("kvStore",), "redis-data": ("kvStore",)}


def field_of(message: str, component: str, pool: Pool) -> str:
    """The field behind the first flag that the message names and a user can set."""
    router = component == "router"
    if not router and component not in ROLES:
        return ""
    spec = pool.spec
    fields_by_flag = (_ROUTERS if router else _NODES) | _STORE
    extra = spec.router.extra_args if router else spec.engine.extra_args
    for flag in _FLAG.findall(message):
        if any(re.match(rf"--(no-)?{flag}(=|$)", given) for given in extra):
            return "spec.router.extraArgs" if router else "spec.engine.extraArgs"
        fields = fields_by_flag.get(flag, ())
        if flag == "model" and spec.model.uri:
            fields = fields[1:]
        if fields:
            owner = f"{component}." if fields[0].startswith("resources") else ""
            return f"spec.{owner}{fields[0]}"
    return ""
