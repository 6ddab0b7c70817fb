"""Draining a cluster's nodes as a user does, over the router's HTTP, and seeing what came of it."""

from __future__ import annotations

import re
from typing import Any

from tests.support.clients.http import Json, exchange, text_of
from tests.support.pools.processes import Cluster

_RETRIES = re.compile(r'^baton_router_retries_total\{cause="(\w+)"\} (\S+)$', re.MULTILINE)


def tell(pool: Cluster, node: str, act: str, **words: Any) -> Json:
    """`act` is drain or resume; the router's answer, which must be a 200."""
    answer = exchange(pool.url, f"/nodes/{node}/{act}", words)
    assert answer.status == 200, answer.body
    return answer.body


def node_of(pool: Cluster, name: str) -> Json:
    """What /pool says of it."""
    node: Json = next(node for node in pool.pool()["nodes"] if node["id"] == name)
    return node


def empty(pool: Cluster, name: str) -> bool:
    """Whether a draining node has nothing left."""
    node = node_of(pool, name)
    kinds = ("requests", "running", "waiting", "parked")
    return node["state"] == "draining" and not any(node["load"][kind] for kind in kinds)


class Retries:
    """Requests that were placed again since this was made."""

    def __init__(self, pool: Cluster) -> None:
        self._pool = pool
        self._before = self._now()

    def of(self, cause: str) -> int:
        return self._now().get(cause, 0) - self._before.get(cause, 0)

    def _now(self) -> dict[str, int]:
        page = text_of(self._pool.url, "/metrics")
        return {cause: int(float(count)) for cause, count in _RETRIES.findall(page)}
