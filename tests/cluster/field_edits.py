"""An edit of every field of a pool's spec, and the children that each edit must change.

In: nothing. Out: `EDITS`, and `fields()`, the schema's leaves, which the table must cover.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, NamedTuple

import msgspec

from baton_operator.api.record import Record
from baton_operator.api.spec import PoolSpec

Spec = dict[str, Any]
Where = tuple[str, str]  # kind, component
PREFILL, DECODE = ("Deployment", "prefill"), ("Deployment", "decode")
ROUTER, SERVICE = ("Deployment", "router"), ("Service", "router")
INGRESS, ROUTE = ("Ingress", "router"), ("HTTPRoute", "router")
INDEX, DATA = ("Deployment", "kv-index"), ("Deployment", "kv-data")
NODES = (PREFILL, DECODE)
# Fields that change no child by themselves. `paused` has its own test; the planner's inputs are
# tested in tests/operator/autoscaling, those of roll-outs in test_reconcile_rollout.
FIELDS_WITHOUT_CHILDREN = frozenset(
    {
        "paused",
        "autoscaling.prefill.max",
        "autoscaling.decode.max",
        "autoscaling.targets.ttftMs",
        "autoscaling.targets.itlMs",
        "autoscaling.targets.percentile",
        "autoscaling.ratio.min",
        "autoscaling.ratio.max",
        "autoscaling.scaleUp.stabilizationSeconds",
        "autoscaling.scaleUp.factor",
        "autoscaling.scaleDown.stabilizationSeconds",
        "autoscaling.scaleDown.nodes",
        "autoscaling.headroomPercent",
        "autoscaling.staleAfterSeconds",
        "autoscaling.storeReadPerSecond",
        "autoscaling.schedules.days",
        "autoscaling.schedules.from",
        "autoscaling.schedules.to",
        "autoscaling.schedules.timeZone",
        "autoscaling.schedules.prefill.min",
        "autoscaling.schedules.prefill.max",
        "autoscaling.schedules.decode.min",
        "autoscaling.schedules.decode.max",
        "rollout.maxDrainSeconds",
        "rollout.surge",
    }
)


class Edit(NamedTuple):
    """`spec` extends a simulated pool's spec. After the edit, the JSON of each child in `where`
    must contain `text`, and not before it; without a text, these children must be deleted."""

    field: str
    spec: Spec
    where: tuple[Where, ...]
    text: str = ""


def _role(name: str, spec: Spec) -> Spec:
    return {name: spec}


def _hub(**model: Any) -> Spec:
    return {"model": {"uri": "hf://acme/tiny@v1", **model}}


def _router(**router: Any) -> Spec:
    return {"router": router}


def _ingress(**ingress: Any) -> Spec:
    return _router(ingress={"host": "llm.example.org", **ingress})


def _route(parent: Spec, **route: Any) -> Spec:
    return _router(httpRoute={"parentRefs": [{"name": "gate", **parent}], **route})


def _tenants(sharing: str, **keys: Any) -> Spec:
    keys = {"name": "tenants", "key": "api-keys"} | keys
    return {"router": {"apiKeysSecret": keys}, "kvStore": {"sharing": sharing}}


def _external(**external: Any) -> Spec:
    urls = {"indexUrl": "redis://index.far", "dataUrls": ["redis://data.far"]}
    return {"kvStore": {"external": urls | external}}


def _template(mark: str) -> Spec:
    return {"podTemplate": {"metadata": {"annotations": {"mark": mark}}}}


def _role_edits(name: str, where: Where) -> tuple[Edit, ...]:
    requests, limits = {"cpu": "123m"}, {"memory": "777Mi"}
    return (
        Edit(f"{name}.replicas", {name: {"replicas": 3}}, (where,), '"replicas": 3'),
        Edit(
            f"{name}.resources.requests",
            {name: {"resources": {"requests": requests}}},
            (where,),
            '"cpu": "123m"',
        ),
        Edit(
            f"{name}.resources.limits",
            {name: {"resources": {"limits": limits}}},
            (where,),
            '"memory": "777Mi"',
        ),
        Edit(f"{name}.podTemplate", {name: _template(f"{name}-mark")}, (where,), f'"{name}-mark"'),
    )


def _autoscaled(**autoscaling: Any) -> Spec:
    bounds = {"prefill": {"max": 4}, "decode": {"max": 4}}
    return {"autoscaling": {"mode": "auto", **bounds, **autoscaling}}


def _autoscaling_edits(name: str, where: Where) -> tuple[Edit, ...]:
    external = _autoscaled(**{name: {"mode": "external"}})
    at_least_4 = _autoscaled(**{name: {"min": 4, "max": 4}})
    return (
        Edit(f"autoscaling.{name}.mode", external, (("PoolScaler", name),), '"PoolScaler"'),
        Edit(f"autoscaling.{name}.min", at_least_4, (where,), '"replicas": 4'),
    )


EDITS = (
    Edit("model.path", {"model": {"path": "/models/mine"}}, NODES, "--model=/models/mine"),
    Edit("model.uri", {"model": {"uri": "pvc://claim/sub"}}, NODES, '"claimName": "claim"'),
    Edit("model.name", {"model": {"name": "shown"}}, (ROUTER,), "--served-model-name=shown"),
    Edit("model.secretRef.name", _hub(secretRef={"name": "hub-login"}), NODES, '"hub-login"'),
    Edit("model.storage", _hub(storage="7Gi"), NODES, "--room=7168MiB"),
    Edit("model.cache.claimName", _hub(cache={"claimName": "kept"}), NODES, '"claimName": "kept"'),
    Edit("model.cache.hostPath", _hub(cache={"hostPath": "/kept"}), NODES, '"path": "/kept"'),
    Edit(
        "engine.kind",
        {"engine": {"kind": "torch"}, "model": {"path": "/m"}},
        NODES,
        "--engine=torch",
    ),
    Edit("engine.dtype", {"engine": {"kind": "sim", "dtype": "float32"}}, NODES, "=float32"),
    Edit(
        "engine.quantization",
        {"engine": {"kind": "sim", "quantization": "int8"}},
        NODES,
        "--quantization=int8",
    ),
    Edit(
        "engine.matmulPrecision",
        {"engine": {"kind": "sim", "matmulPrecision": "high"}},
        NODES,
        "--matmul-precision=high",
    ),
    Edit(
        "engine.kvCacheDtype",
        {"engine": {"kind": "sim", "kvCacheDtype": "int8"}},
        NODES,
        "--kv-cache-dtype=int8",
    ),
    Edit(
        "engine.runner",
        {"engine": {"kind": "sim", "runner": "pooling"}},
        NODES,
        "--runner=pooling",
    ),
    *(
        Edit(
            f"engine.speculativeConfig.{key}",
            {"engine": {"kind": "sim", "speculativeConfig": {"method": "ngram", key: value}}},
            NODES,
            "suffix" if key == "method" else key,
        )
        for key, value in (
            *(("method", "suffix"), ("num_speculative_tokens", 6)),
            *(("prompt_lookup_min", 2), ("prompt_lookup_max", 7)),
            *(("model", "/models/small"), ("quantization", "int4")),
        )
    ),
    Edit(
        "engine.batchInvariant",
        {"engine": {"kind": "sim", "batchInvariant": True}},
        NODES,
        "--batch-invariant=on",
    ),
    Edit(
        "engine.storeCodec", {"engine": {"kind": "sim", "storeCodec": "int8"}}, NODES, "codec=int8"
    ),
    Edit("engine.blockSize", {"engine": {"kind": "sim", "blockSize": 32}}, NODES, "block-size=32"),
    Edit("engine.chunkBlocks", {"engine": {"kind": "sim", "chunkBlocks": 4}}, NODES, "blocks=4"),
    Edit("engine.maxModelLen", {"engine": {"kind": "sim", "maxModelLen": 99}}, NODES, "-len=99"),
    Edit(
        "engine.startTimeoutSeconds",
        {"engine": {"kind": "sim", "startTimeoutSeconds": 77}},
        NODES,
        "--start-timeout=77",
    ),
    Edit(
        "engine.extraArgs",
        {"engine": {"kind": "sim", "extraArgs": ["--max-num-seqs=7"]}},
        NODES,
        "--max-num-seqs=7",
    ),
    *_role_edits("prefill", PREFILL),
    *_autoscaling_edits("prefill", PREFILL),
    *_role_edits("decode", DECODE),
    *_autoscaling_edits("decode", DECODE),
    Edit(
        "autoscaling.mode",
        {"autoscaling": {"mode": "external"}},
        (("PoolScaler", "prefill"), ("PoolScaler", "decode")),
        '"PoolScaler"',
    ),
    Edit(
        "autoscaling.scaleToZeroAfterSeconds",
        _autoscaled(scaleToZeroAfterSeconds=60),
        (ROUTER,),
        "--wake-wait=900",
    ),
    Edit(
        "autoscaling.sleepAfterSeconds",
        _autoscaled(sleepAfterSeconds=60),
        (ROUTER,),
        "--sleep-after=60",
    ),
    Edit(
        "autoscaling.sleepLevel",
        _autoscaled(sleepAfterSeconds=60, sleepLevel=2),
        (ROUTER,),
        "--sleep-level=2",
    ),
    *_role_edits("router", ROUTER),
    Edit("router.service.type", _router(service={"type": "NodePort"}), (SERVICE,), '"NodePort"'),
    Edit("router.service.port", _router(service={"port": 8123}), (SERVICE,), '"port": 8123'),
    Edit(
        "router.service.annotations",
        _router(service={"annotations": {"mark": "service"}}),
        (SERVICE,),
        '"mark": "service"',
    ),
    Edit("router.ingress.host", _ingress(host="a.example.org"), (INGRESS,), '"a.example.org"'),
    Edit("router.ingress.className", _ingress(className="fast"), (INGRESS,), '"fast"'),
    Edit("router.ingress.tlsSecretName", _ingress(tlsSecretName="tls"), (INGRESS,), '"tls"'),
    Edit(
        "router.ingress.annotations",
        _ingress(annotations={"mark": "ingress"}),
        (INGRESS,),
        '"mark": "ingress"',
    ),
    Edit("router.httpRoute.parentRefs.name", _route({"name": "exit"}), (ROUTE,), '"exit"'),
    Edit(
        "router.httpRoute.parentRefs.namespace", _route({"namespace": "edge"}), (ROUTE,), '"edge"'
    ),
    Edit(
        "router.httpRoute.parentRefs.sectionName",
        _route({"sectionName": "https"}),
        (ROUTE,),
        '"https"',
    ),
    Edit(
        "router.httpRoute.hostnames",
        _route({}, hostnames=["b.example.org"]),
        (ROUTE,),
        '"b.example.org"',
    ),
    Edit("router.placement", _router(placement="random"), (ROUTER,), "--placement=random"),
    Edit("router.extraArgs", _router(extraArgs=["--keepalive=3"]), (ROUTER,), "--keepalive=3"),
    Edit(
        "router.apiKeysSecret.name",
        _tenants("pool", name="my-keys"),
        (ROUTER,),
        '"secretName": "my-keys"',
    ),
    Edit(
        "router.apiKeysSecret.key",
        _tenants("pool", key="other.txt"),
        (ROUTER,),
        "--api-keys=/etc/baton/api-keys/other.txt",
    ),
    Edit("kvStore.sharing", _tenants("tenant"), (ROUTER,), "--sharing=tenant"),
    Edit(
        "kvStore.managed.memory",
        {"kvStore": {"managed": {"memory": "128Mi"}}},
        (DATA,),
        f'"{128 << 20}"',
    ),
    Edit(
        "kvStore.managed.dataInstances",
        {"kvStore": {"managed": {"dataInstances": 2}}},
        NODES,
        "-kv-data-1.",
    ),
    *(
        Edit(
            f"kvStore.managed.{name}.{kind}",
            {"kvStore": {"managed": {name: {kind: {"cpu": cpu}}}}},
            (where,),
            f'"cpu": "{cpu}"',
        )
        for name, where in (("indexResources", INDEX), ("dataResources", DATA))
        for kind, cpu in (("requests", "123m"), ("limits", "777m"))
    ),
    Edit(
        "kvStore.managed.podTemplate",
        {"kvStore": {"managed": _template("store-mark")}},
        (INDEX, DATA),
        '"store-mark"',
    ),
    Edit(
        "kvStore.external.indexUrl",
        _external(indexUrl="redis://other.index"),
        (*NODES, ROUTER),
        "redis://other.index",
    ),
    Edit(
        "kvStore.external.dataUrls",
        _external(dataUrls=["redis://other.data"]),
        NODES,
        "redis://other.data",
    ),
    Edit(
        "kvStore.external.secretRef.name",
        _external(secretRef={"name": "far-login"}),
        (*NODES, ROUTER),
        '"far-login"',
    ),
    Edit(
        "kvStore.external.caSecretRef.name",
        _external(indexUrl="rediss://index.far", caSecretRef={"name": "far-ca"}),
        (*NODES, ROUTER),
        '"far-ca"',
    ),
    Edit("handoff", {"handoff": "never"}, (ROUTER,), "--handoff=never"),
    Edit("missingRolePolicy", {"missingRolePolicy": "queue"}, (ROUTER,), "--missing-role=queue"),
    Edit(
        "gpuBudget",
        {
            "gpuBudget": 2,
            "decode": {"replicas": 9, "resources": {"limits": {"nvidia.com/gpu": 1}}},
        },
        (DECODE,),
        '"replicas": 2',
    ),
    Edit(
        "networkPolicy.clients",
        {"networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "shop"}}}]}},
        (("NetworkPolicy", "router"),),
        '"app": "shop"',
    ),
    Edit(
        "networkPolicy.monitoring",
        {"networkPolicy": {"monitoring": [{"podSelector": {"matchLabels": {"app": "eye"}}}]}},
        (("NetworkPolicy", "prefill"), ("NetworkPolicy", "decode")),
        '"app": "eye"',
    ),
    Edit(
        "networkPolicy.enabled",
        {"networkPolicy": {"enabled": False}},
        tuple(("NetworkPolicy", name) for name in ("router", "prefill", "decode", "kv-index")),
    ),
)


def fields(record: type[Record] = PoolSpec, prefix: str = "") -> set[str]:
    """The paths of the spec's leaf fields, as users write them."""
    paths = set()
    for field in msgspec.structs.fields(record):
        path = f"{prefix}{field.encode_name}"
        inner = _record(field.type)
        paths |= fields(inner, f"{path}.") if inner is not None else {path}
    return paths


def _record(hint: Any) -> type[Record] | None:
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Annotated:
        parts = parts[:1]
    return next((found for part in parts if (found := _record(part)) is not None), None)
