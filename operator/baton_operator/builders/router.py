"""The routers: one Deployment, which Kubernetes itself rolls, and the Service that clients use.

A router finds its nodes through the registry on the index and mounts no model. Its /ready reflects
the pool: the Service has no endpoint while no node could answer. Only routers know API keys and
tenants.

They are reached from outside the cluster by an Ingress, a Gateway API HTTPRoute, or not at all.
"""

from __future__ import annotations

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.pool import Pool
from baton_operator.api.resources import Resources
from baton_operator.api.router import ParentRef
from baton_operator.builders.child import ChildIdentity, Manifest
from baton_operator.builders.credentials import link_token_variable, tenant_secret_variable
from baton_operator.builders.pods import (
    EPHEMERAL,
    LITTLE_STORAGE,
    MOST_LITTLE_STORAGE,
    STOP_S,
    Mounts,
    apart,
    deadline_s,
    flags,
    http_container,
    http_get,
    literal,
    pod_template,
    resources,
    scratch_size,
    startup_probe,
    variables,
)
from baton_operator.builders.store_access import store_certificate, store_login, store_settings
from baton_operator.names import DRAIN_S, ROUTER_PORT, WAKE_WAIT_FLAG

# Seconds for which connections still arrive after the pod was removed from the Service.
LEAVE_S = 3
# A router uses one core: half a core on a full machine, and the memory with a large tokenizer,
# 10,000 idle connections and 1,000 streams. Without a memory limit: an OOM kill of a router would
# break its clients' streams.
DEFAULT_RESOURCES = Resources(
    requests={"cpu": "500m", "memory": "512Mi", EPHEMERAL: LITTLE_STORAGE},
    limits={EPHEMERAL: MOST_LITTLE_STORAGE},
)
# Seconds for which a request to a pool without nodes, or whose nodes sleep, waits for the first.
WAKE_WAIT_S = 900
KEYS_FOLDER = "/etc/baton/api-keys"
INGRESS_API = "networking.k8s.io/v1"
ROUTE_API = "gateway.networking.k8s.io/v1"


def build_router(pool: Pool, nodes_s: int) -> Manifest:
    """`nodes_s`: seconds until the first node may be ready, without which no router is ready."""
    child, spec = ChildIdentity(pool, "router"), pool.spec.router
    mounts = store_certificate(pool) + _api_keys(pool)
    salted = pool.spec.kv_store.sharing == "tenant"
    tenants = (tenant_secret_variable(pool),) if salted else ()
    container = http_container(
        pool,
        "router",
        pool.installation.images.router,
        ["router", "--json-logs", *flags(_settings(pool)), *literal(spec.extra_args)],
        ROUTER_PORT,
        env=variables(*store_login(pool), link_token_variable(pool), *tenants),
        resources=resources(spec.resources, DEFAULT_RESOURCES),
        # Not /ready, which waits for nodes.
        startupProbe=startup_probe(http_get("/health")),
        lifecycle={"preStop": {"sleep": {"seconds": LEAVE_S}}},
        volumeMounts=mounts.mounts,
    )
    template = pod_template(
        child,
        [container],
        spec.pod_template,
        grace_s=LEAVE_S + DRAIN_S + STOP_S,
        scratch=scratch_size(spec.resources, MOST_LITTLE_STORAGE),
        volumes=mounts.volumes,
        own_secrets=(pool.credentials.tenant_secret,) if salted else (),
        # Also for one replica, so that a second one is not a reason to replace the first. Pods of
        # an older template do not count; otherwise all new ones could end up on one cluster node.
        affinity=apart(child.selector(), "pod-template-hash"),
    )
    return child.deployment(
        template, deadline_s=deadline_s(template, nodes_s), replicas=spec.replicas
    )


def build_router_service(pool: Pool) -> Manifest:
    spec = pool.spec.router.service
    child = ChildIdentity(pool, "router")
    return child.service("http", spec.port, spec.annotations, type=spec.type)


def _settings(pool: Pool) -> dict[str, str | int | None]:
    spec, sharing = pool.spec.router, pool.spec.kv_store.sharing
    keys = spec.api_keys_secret
    return {
        "host": "0.0.0.0",
        "port": ROUTER_PORT,
        "pool": pool.key,
        "redis-index": store_settings(pool).index_url,
        # A router's flag and not a node's: a new name is no reason to load the model again.
        "served-model-name": ",".join(pool.spec.model_names),
        "handoff": pool.spec.handoff,
        "missing-role": pool.spec.missing_role_policy,
        "api-keys": f"{KEYS_FOLDER}/{keys.key}" if keys is not None else None,
        # Left out if it is the default, so that routers of older pools are not replaced.
        "sharing": sharing if sharing != "pool" else None,
        "placement": spec.placement if spec.placement != "cost" else None,
        "drain-timeout": DRAIN_S,
        **_idle_settings(pool.spec.autoscaling),
    }


def _idle_settings(scaling: AutoscalingSpec | None) -> dict[str, str | int | None]:
    """What the routers of an idle pool do."""
    if scaling is None:
        return {}
    after_s, level = scaling.sleep_after_seconds, scaling.sleep_level
    return {
        WAKE_WAIT_FLAG: WAKE_WAIT_S if scaling.scales_to_zero or after_s else None,
        "sleep-after": after_s,
        "sleep-level": level if after_s and level != 1 else None,
    }


def _api_keys(pool: Pool) -> Mounts:
    """Mounts only the key file of the Secret."""
    keys = pool.spec.router.api_keys_secret
    if keys is None:
        return Mounts()
    secret = {"secretName": keys.name, "items": [{"key": keys.key, "path": keys.key}]}
    return Mounts(
        ({"name": "api-keys", "secret": secret},),
        ({"name": "api-keys", "mountPath": KEYS_FOLDER, "readOnly": True},),
    )


def build_routes(pool: Pool) -> tuple[Manifest, ...]:
    """The routes in the spec. The cluster may lack the Gateway API's CRDs."""
    router = pool.spec.router
    ingress = (_ingress(pool),) if router.ingress is not None else ()
    return (*ingress, *((_http_route(pool),) if router.http_route is not None else ()))


def _ingress(pool: Pool) -> Manifest:
    child, spec = ChildIdentity(pool, "router"), pool.spec.router.ingress
    assert spec is not None
    service = {"name": child.name, "port": {"name": "http"}}
    path = {"path": "/", "pathType": "Prefix", "backend": {"service": service}}
    tls = [{"hosts": [spec.host], "secretName": spec.tls_secret_name}]
    return {
        "apiVersion": INGRESS_API,
        "kind": "Ingress",
        "metadata": child.metadata(spec.annotations),
        "spec": {
            **({"ingressClassName": spec.class_name} if spec.class_name else {}),
            **({"tls": tls} if spec.tls_secret_name else {}),
            "rules": [{"host": spec.host, "http": {"paths": [path]}}],
        },
    }


def _http_route(pool: Pool) -> Manifest:
    child, spec = ChildIdentity(pool, "router"), pool.spec.router.http_route
    assert spec is not None
    backend = {"name": child.name, "port": pool.spec.router.service.port}
    return {
        "apiVersion": ROUTE_API,
        "kind": "HTTPRoute",
        "metadata": child.metadata(),
        "spec": {
            "parentRefs": [_parent(ref) for ref in spec.parent_refs],
            **({"hostnames": list(spec.hostnames)} if spec.hostnames else {}),
            "rules": [{"backendRefs": [backend]}],
        },
    }


def _parent(ref: ParentRef) -> Manifest:
    fields = {"name": ref.name, "namespace": ref.namespace, "sectionName": ref.section_name}
    return {key: value for key, value in fields.items() if value}
