"""The OpenAI gateway: one Deployment that Kubernetes itself rolls, and the Service clients use.

It finds its nodes through the registry on the index and mounts no model. Its /ready is that of the
pool: the Service has no endpoint while nobody could answer.
"""

from __future__ import annotations

from baton_operator.builders.child import Child, Manifest
from baton_operator.builders.credentials import link_token_variable
from baton_operator.builders.model import model_name
from baton_operator.builders.pods import (
    DRAIN_S,
    STOP_S,
    flags,
    http_container,
    literal,
    pod_template,
    resources,
    variables,
)
from baton_operator.builders.store_access import store_certificate, store_login, store_settings
from baton_operator.pool import Pool

PORT = 8000  # as on a laptop
# Connections that were on their way when the pod left the Service still find it listening.
LEAVE_S = 3


def build_router(pool: Pool) -> Manifest:
    child, spec, certificate = Child(pool, "router"), pool.spec.router, store_certificate(pool)
    token = link_token_variable(pool)
    container = http_container(
        pool,
        "router",
        pool.installation.images.router,
        ["router", "--json-logs", *flags(_settings(pool)), *literal(spec.extra_args)],
        PORT,
        env=variables(*store_login(pool), token),
        resources=resources(spec.resources),
        lifecycle={"preStop": {"sleep": {"seconds": LEAVE_S}}},
        volumeMounts=certificate.mounts,
    )
    template = pod_template(
        child,
        [container],
        spec.pod_template,
        grace_s=LEAVE_S + DRAIN_S + STOP_S,
        volumes=certificate.volumes,
        # Also for one replica, so that a second one does not replace the first.
        affinity=_apart(child),
    )
    return child.deployment(template, replicas=spec.replicas)


def build_router_service(pool: Pool) -> Manifest:
    spec = pool.spec.router.service
    child = Child(pool, "router")
    return child.service("http", spec.port, spec.annotations, type=spec.type)


def _settings(pool: Pool) -> dict[str, str | int | None]:
    return {
        "host": "0.0.0.0",
        "port": PORT,
        "pool": pool.key,
        "redis-index": store_settings(pool).index_url,
        # Here and not at the nodes: another name is no reason to load the model again.
        "served-model-name": model_name(pool),
        "handoff": pool.spec.handoff,
        "missing-role": pool.spec.missing_role_policy,
        "drain-timeout": DRAIN_S,
    }


def _apart(child: Child) -> Manifest:
    """Rather on different cluster nodes."""
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": child.selector()},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
