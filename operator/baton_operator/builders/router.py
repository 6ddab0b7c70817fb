"""The OpenAI gateway: one Deployment that Kubernetes itself rolls, and the Service clients use.

It finds its nodes through the registry on the index and mounts no model. Its /ready is that of the
pool: the Service has no endpoint while nobody could answer.
"""

from __future__ import annotations

from baton_operator.builders.child import Child, Manifest
from baton_operator.builders.pods import DRAIN_S, STOP_S, flags, http_container, pod_template
from baton_operator.builders.store import store_settings
from baton_operator.pool import Pool

PORT = 8000  # as on a laptop


def build_router(pool: Pool) -> Manifest:
    child = Child(pool, "router")
    settings: dict[str, str | int | None] = {
        "host": "0.0.0.0",
        "port": PORT,
        "pool": pool.key,
        "redis-index": store_settings(pool).index_url,
        "handoff": pool.spec.handoff,
        "missing-role": pool.spec.missing_role_policy,
        "drain-timeout": DRAIN_S,
    }
    words = ["router", "--json-logs", *flags(settings)]
    container = http_container("router", pool.images.router, words, PORT)
    template = pod_template(child, container, DRAIN_S + STOP_S)
    return child.workload("Deployment", template, replicas=1)


def build_router_service(pool: Pool) -> Manifest:
    return Child(pool, "router").service("http", PORT)
