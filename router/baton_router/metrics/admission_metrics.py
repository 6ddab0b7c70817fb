"""Metrics of admission: tokens by tenant, queue lengths and waits, errors by code."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton_router.openai.answers import Usage

MAX_TENANTS = 1000
OTHER = "other"
_WAIT_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120)


class AdmissionMetrics:
    """Metrics of admission: tokens by tenant, queue lengths and waits, errors by code.

    In: what Admission and the middleware observe. Out: metrics in the router's registry. Labels are
    bounded: tenants come from the file of keys, priorities from -100 to 100, codes from the error
    vocabulary. The first MAX_TENANTS tenants get a label each, later ones share OTHER.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants: set[str] = set()
        self._tokens = Counter(
            "baton_router_tenant_tokens_total",
            "Tokens of ended requests, by tenant and kind: prompt or completion.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._queue = Gauge(
            "baton_router_admission_queue",
            "Calls that wait in the router because every node is full, by priority.",
            ("priority",),
            registry=registry,
        )
        self._waits = Histogram(
            "baton_router_admission_wait_seconds",
            "Seconds that each prompt waited in the router, admitted or not, by priority.",
            ("priority",),
            buckets=_WAIT_BUCKETS_S,
            registry=registry,
        )
        self._refused = Counter(
            "baton_router_rejected_total",
            "Generation requests that ended in an error, by error code.",
            ("code",),
            registry=registry,
        )

    def used(self, tenant: str, usage: Usage) -> None:
        if tenant not in self._tenants and len(self._tenants) < MAX_TENANTS:
            self._tenants.add(tenant)
        label = tenant if tenant in self._tenants else OTHER
        self._tokens.labels(label, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(label, "completion").inc(usage.completion_tokens)

    def lengths(self, by_priority: Mapping[int, int]) -> None:
        for priority, length in by_priority.items():
            self._queue.labels(str(priority)).set(length)

    def waited(self, priority: int, seconds: float, by_priority: Mapping[int, int]) -> None:
        self._waits.labels(str(priority)).observe(seconds)
        self.lengths(by_priority)

    def rejected(self, code: str) -> None:
        self._refused.labels(code).inc()
