"""What the operator counts and measures, for Prometheus.

In: calls of the other modules. Out: GET /metrics on a port of its own, from a thread: it answers
also while the event loop is busy.
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


SILENCE_S = 30.0  # that a scraper's connection may last without a request


class Metrics:
    """One operator's. Names are `baton_operator_*`."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.reconcile_seconds = Histogram(
            "baton_operator_reconcile_seconds",
            "One look at one pool, requests included",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._reconciles = Counter(
            "baton_operator_reconciles",
            "Looks at pools, by how they ended",
            ["result"],
            registry=registry,
        )
        self._requests = Counter(
            "baton_operator_api_requests",
            "Requests to the API server besides watches, by verb and HTTP code",
            ["verb", "code"],
            registry=registry,
        )
        self._children = Counter(
            "baton_operator_child_writes",
            "Children applied and deleted",
            ["act", "kind"],
            registry=registry,
        )
        self._pools = Gauge(
            "baton_operator_pools",
            "Pools by the state of their condition Ready",
            ["ready"],
            registry=registry,
        )
        self._leader = Gauge(
            "baton_operator_leader", "1 while this replica acts", registry=registry
        )
        self._depth = Gauge(
            "baton_operator_queue_depth", "Pools that wait to be looked at", registry=registry
        )
        self._lag = Gauge(
            "baton_operator_watch_lag_seconds",
            "For how long the watches have not shown what was written here; 0 while they keep up",
            registry=registry,
        )

        self._desired = Gauge(
            "baton_operator_desired_nodes",
            "Nodes that the planner wants, or would want where it only advises",
            ["pool", "role"],
            registry=registry,
        )
        self._decisions = Counter(
            "baton_operator_decisions",
            "Looks of the planner, by pool and reason",
            ["pool", "reason"],
            registry=registry,
        )
        self._reasons: dict[str, set[str]] = {}

    def decided(self, pool: str, prefill: int, decode: int, reason: str) -> None:
        """How many nodes the planner wants now."""
        self._desired.labels(pool, "prefill").set(prefill)
        self._desired.labels(pool, "decode").set(decode)
        self._decisions.labels(pool, reason).inc()
        self._reasons.setdefault(pool, set()).add(reason)

    def undecided(self, pool: str) -> None:
        """Nobody plans for it any more."""
        for role in ("prefill", "decode"):
            self._desired.remove(pool, role)
        for reason in self._reasons.pop(pool, set()):
            self._decisions.remove(pool, reason)

    def reconciled(self, result: Result) -> None:
        self._reconciles.labels(result).inc()

    def requested(self, verb: str, code: str) -> None:
        self._requests.labels(verb, code).inc()

    def wrote(self, act: Literal["apply", "delete", "patch"], kind: str) -> None:
        self._children.labels(act, kind).inc()

    def leads(self, leads: bool) -> None:
        self._leader.set(leads)

    def observe(
        self,
        queue_depth: Callable[[], float],
        watch_lag_s: Callable[[], float],
        pools: Callable[[], Iterable[str]],
    ) -> None:
        """Ask these at each scrape, in its thread. `pools` says each one's state of Ready."""
        self._depth.set_function(queue_depth)
        self._lag.set_function(watch_lag_s)
        for ready in ("True", "False", "Unknown"):
            self._pools.labels(ready).set_function(partial(_count, pools, ready))

    def serve(self, host: str, port: int, silence_s: float = SILENCE_S) -> Callable[[], None]:
        """Listen; what is returned ends it. Raise OSError where the port is taken."""
        server, thread = start_http_server(port, host, self._registry)
        # Its own waits for a request for ever, in a thread for each connection.
        server.RequestHandlerClass = type("_Handler", (_Handler,), {"timeout": silence_s})

        def close() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return close


class _Handler(WSGIRequestHandler):
    """A connection is closed where its client is silent for `timeout` seconds."""

    def handle(self) -> None:
        with suppress(TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""


def _count(pools: Callable[[], Iterable[str]], ready: str) -> float:
    return sum(1 for state in pools() if state == ready)
