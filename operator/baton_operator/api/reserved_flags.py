"""The flags of nodes and routers that the operator writes itself, so that nobody else may.

In: nothing. Out: names for the builders' tests and for the rule on `extraArgs`: of two equal flags
the last one counts, and a pool whose nodes listen elsewhere than its Services look is lost. So
is one whose nodes do not agree about `kv-shards`, which is nobody's to write. Not in them is
`device`, though the operator writes it for a GPU among the limits: a GPU may also come by the
podTemplate or by a resource claim, and then only the user knows.
"""

from __future__ import annotations

# Which of them say a secret: those come from the environment, as does a router's tenant-secret.
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
    "block-size",
    "chunk-blocks",
    "kv-shards",
    "max-model-len",
    "start-timeout",
)
ROUTER_FLAGS = (
    *_PROCESS,
    *_SECRET,
    "tenant-secret",
    "handoff",
    "missing-role",
    "api-keys",
    "sharing",
    "wake-wait",
    "workers",
    "placement",
)
