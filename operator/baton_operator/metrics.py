"""The operator's Prometheus metrics.

In: calls from the other modules. Out: GET /metrics on its own port. A thread serves it, so it
answers even while the event loop is busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Literal
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.process_collector import ProcessCollector

Result = Literal["done", "invalid", "refused", "conflict", "throttled", "unavailable", "error"]
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SILENCE_S = 30.0  # seconds without a request after which a scraper's connection is closed


class Metrics:
    """The metrics of one operator. Their names start with baton_operator_."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.reconcile_seconds = Histogram(
            "baton_operator_reconcile_seconds",
            "Duration of one reconcile of a pool, including its API requests, in seconds.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._reconciles = Counter(
            "baton_operator_reconciles",
            "Reconciles of pools, by result.",
            ["result"],
            registry=registry,
        )
        self._requests = Counter(
            "baton_operator_api_requests",
            "Requests to the API server except watches, by verb and HTTP code.",
            ["verb", "code"],
            registry=registry,
        )
        self._children = Counter(
            "baton_operator_child_writes",
            "Writes to pools' child objects, by action and kind.",
            ["act", "kind"],
            registry=registry,
        )
        self._pools = Gauge(
            "baton_operator_pools",
            "Pools, by the status of their condition Ready.",
            ["ready"],
            registry=registry,
        )
        self._leader = Gauge(
            "baton_operator_leader", "1 while this replica is the leader.", registry=registry
        )
        self._depth = Gauge(
            "baton_operator_queue_depth", "Pools that wait for a reconcile.", registry=registry
        )
        self._lag = Gauge(
            "baton_operator_watch_lag_seconds",
            "Seconds for which the watches have not shown the operator's own writes; 0 "
            "while they keep up.",
            registry=registry,
        )

        self._desired = Gauge(
            "baton_operator_desired_nodes",
            "Nodes that the planner wants; mode advise does not apply the number.",
            ["pool", "role"],
            registry=registry,
        )
        self._decisions = Counter(
            "baton_operator_decisions",
            "Decisions of the planner, by pool and reason.",
            ["pool", "reason"],
            registry=registry,
        )
        self._reasons: dict[str, set[str]] = {}

    def decided(self, pool: str, prefill: int, decode: int, reason: str) -> None:
        """Record the planner's decision for a pool."""
        self._desired.labels(pool, "prefill").set(prefill)
        self._desired.labels(pool, "decode").set(decode)
        self._decisions.labels(pool, reason).inc()
        self._reasons.setdefault(pool, set()).add(reason)

    def undecided(self, pool: str) -> None:
        """Remove the pool's series: the planner no longer runs for it."""
        for role in ("prefill", "decode"):
            self._desired.remove(pool, role)
        for reason in self._reasons.pop(pool, set()):
            self._decisions.remove(pool, reason)

    def count_reconcile(self, result: Result) -> None:
        self._reconciles.labels(result).inc()

    def count_request(self, verb: str, code: str) -> None:
        self._requests.labels(verb, code).inc()

    def count_write(self, act: Literal["apply", "delete", "patch"], kind: str) -> None:
        self._children.labels(act, kind).inc()

    def set_leading(self, leading: bool) -> None:
        self._leader.set(leading)

    def observe(
        self,
        queue_depth: Callable[[], float],
        watch_lag_s: Callable[[], float],
        pools: Callable[[], Iterable[str]],
    ) -> None:
        """Call these functions at each scrape, in its thread. `pools` yields the status of each
        pool's condition Ready."""
        self._depth.set_function(queue_depth)
        self._lag.set_function(watch_lag_s)
        for ready in ("True", "False", "Unknown"):
            self._pools.labels(ready).set_function(partial(_count, pools, ready))

    def serve(self, host: str, port: int, silence_s: float = SILENCE_S) -> Callable[[], None]:
        """Start the server and return a function that stops it. Raise OSError if the port is in
        use."""
        server, thread = start_http_server(port, host, self.registry)
        # The default handler waits for a request without a timeout, in a thread per connection.
        server.RequestHandlerClass = type("_Handler", (_Handler,), {"timeout": silence_s})

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close


class _Handler(WSGIRequestHandler):
    """Closes a connection after `timeout` seconds without a request."""

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Do not log scrapes."""


def _count(pools: Callable[[], Iterable[str]], ready: str) -> float:
    return sum(1 for state in pools() if state == ready)
