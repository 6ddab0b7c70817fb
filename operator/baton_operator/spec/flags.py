"""The flags of nodes and routers that the operator writes itself, so that nobody else may.

In: nothing. Out: names for the builders' tests and for the rule on `extraArgs`: of two equal flags
the last one counts, and a pool whose nodes listen elsewhere than its Services look is lost. Not in
them is `device`, though the operator writes it for a GPU among the limits: a GPU may also come by
the podTemplate or by a resource claim, and then only the user knows.
"""

from __future__ import annotations

# Which of them say a secret: those come from the environment.
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
    "max-model-len",
    "start-timeout",
)
ROUTER_FLAGS = (*_PROCESS, *_SECRET, "handoff", "missing-role")
