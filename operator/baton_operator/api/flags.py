"""The flags of nodes and routers that the operator sets, so that `extraArgs` may not contain them.

The last of two equal flags wins, and a pool breaks if its nodes listen on another port than its
Services expect. `kv-shards` is in the list because a pool breaks if its nodes differ in it.
`device` is not, although the operator sets it for a GPU limit: a GPU may also come from the
podTemplate or from a resource claim, and only the user knows about those.
"""

from __future__ import annotations

from typing import Annotated

from baton_operator.api.cel import flag_meta

# Flags with a secret: pods get these, and a router's tenant-secret, from the environment.
_SECRET = ("redis-username", "redis-password", "link-token")
_PROCESS = (
    "host",
    "port",
    "pool",
    "json-logs",
    "drain-timeout",
    "redis-index",
    "served-model-name",
)
NODE_FLAGS = (
    *_PROCESS,
    *_SECRET,
    "node",
    "address",
    "revision",
    "redis-data",
    "engine",
    "model",
    "dtype",
    "batch-invariant",
    "block-size",
    "chunk-blocks",
    "kv-shards",
    "max-model-len",
    "start-timeout",
)
ROUTER_FLAGS = (
    *_PROCESS,
    *_SECRET,
    "uds",
    "tenant-secret",
    "handoff",
    "missing-role",
    "api-keys",
    "sharing",
    "wake-wait",
    "sleep-after",
    "sleep-level",
    "placement",
)
NodeFlag = Annotated[str, flag_meta(NODE_FLAGS)]
RouterFlag = Annotated[str, flag_meta(ROUTER_FLAGS)]
