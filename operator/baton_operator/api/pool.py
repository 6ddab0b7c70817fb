"""An InferencePool as the other folders use it: metadata, spec, installation and credentials.

In: the resource as the API returns it, the operator's installation, the pool's credentials.
Out: a `Pool`, or a one-line error that says what to write instead.

SpecError   the pool cannot be built; one line: field, offending value, what to write

PoolSpec holds what a user may write in `spec`; every field has an effect. Keys are camelCase in
YAML, snake_case here. `crd` generates the CRD from these records, including defaults and
descriptions. A check beyond the type is a `CelRule` of a value (`fields`) or of a record, and the
API server enforces it. `__post_init__` repeats only the checks without which the builders would
fail, because a pool may have been stored before its rule existed.
"""

from __future__ import annotations

import hashlib
import math
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, field

from baton_operator.api.autoscaling import AutoscalingSpec
from baton_operator.api.fields import (
    KEY_DEFAULT,
    MOST_NODES,
    MOST_ROUTERS,
    SET,
    Annotations,
    CelRule,
    Folder,
    HostName,
    MaybeName,
    ModelName,
    ModelUri,
    Name,
    NodeFlag,
    Peer,
    PodTemplate,
    Quantity,
    Record,
    Resources,
    RouterFlag,
    SecretFile,
    SecretRef,
    both,
    check_quantity,
    given,
    keyed,
)
from baton_operator.api.store import ExternalStore as ExternalStore
from baton_operator.api.store import KVStoreSpec
from baton_operator.api.store import ManagedStore as ManagedStore
from baton_operator.names import FETCH_CONTAINER, LONGEST_POOL_NAME, OWN_PREFIX, POOL_NAME
from baton_protocol.model_source import HubModel, ModelSource, parse_source
from baton_protocol.store import ROLES, Role

EngineKind = Literal["torch", "sim"]
DType = Literal["auto", "float32", "bfloat16"]
Handoff = Literal["auto", "always", "never"]
MissingRole = Literal["aggregate", "queue", "fail"]
RouterPlacement = Literal["cost", "prefix", "least-request", "round-robin", "random"]
ServiceType = Literal["ClusterIP", "NodePort", "LoadBalancer"]
REQUEST_S = 600  # the router's default for --request-timeout, seconds
_REQUEST_FLAG = "--request-timeout="


class ModelCache(Record, frozen=True, kw_only=True):
    """Where fetched models are kept."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"{given('claimName')} != {given('hostPath')}",
            "needs exactly one place; write claimName or hostPath, or leave cache out, so each "
            "pod fetches the model itself",
        ),
    )

    claim_name: Annotated[
        MaybeName,
        Meta(
            description="A PersistentVolumeClaim that all nodes can write. The model is fetched"
            " once."
        ),
    ] = ""
    host_path: Annotated[
        Folder,
        Meta(
            description="A directory on the cluster's nodes. The model is fetched once per cluster"
            " node. Pod Security level `restricted` does not allow it."
        ),
    ] = ""


class ModelSpec(Record, frozen=True, kw_only=True):
    """The model that all nodes serve."""

    _fetched: ClassVar[str] = "(has(self.uri) && self.uri.startsWith('hf://'))"
    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"!{given('path')} || !{given('uri')}",
            "must not be set together with path; write one of the two",
            field=".uri",
        ),
        CelRule(
            f"!has(self.secretRef) || {_fetched}",
            "only a model from a hub needs a token; write uri: hf://ORG/NAME, or leave this out",
            field=".secretRef",
        ),
        CelRule(
            f"!has(self.cache) || {_fetched}",
            "only a model from a hub is fetched; write uri: hf://ORG/NAME, or leave this out",
            field=".cache",
        ),
        CelRule(
            f"!has(self.storage) || ({_fetched} && !has(self.cache))",
            "only a model that each pod fetches uses the pod's storage; write uri: "
            "hf://ORG/NAME without cache, or leave this out",
            field=".storage",
        ),
    )

    path: Annotated[
        Folder,
        Meta(
            description="A Hugging Face model directory in the node's container, from the image or"
            " the podTemplate."
        ),
    ] = ""
    uri: Annotated[
        ModelUri,
        Meta(
            description="Source of the model: pvc://CLAIM/FOLDER, or hf://ORG/NAME[@REVISION],"
            " which is fetched."
        ),
    ] = ""
    name: Annotated[
        ModelName,
        Meta(
            description="Model name in the API. Default: the last component of the folder or"
            " repository."
        ),
    ] = ""
    secret_ref: Annotated[
        SecretRef | None,
        Meta(description="Secret whose key `token` holds the hub's access token. Only for hf://."),
    ] = None
    cache: Annotated[
        ModelCache | None, Meta(description="Where the fetched model is kept. Only for hf://.")
    ] = None
    storage: (
        Annotated[
            Quantity,
            Meta(
                description="Ephemeral storage that each node's pod requests for the fetched model,"
                " and the model's maximum size. Only for hf:// without cache. Default: 20Gi, or 1Gi"
                " for a simulated engine, which fetches no weights."
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.storage is not None:
            check_quantity("storage", self.storage)
        if self.path and self.uri:
            raise ValueError("uri: must not be set together with path; write one of the two")
        if self.uri:
            try:
                parse_source(self.uri)
            except ValueError as error:
                raise ValueError(f"uri: {error}") from error

    @property
    def source(self) -> ModelSource | None:
        """The parsed `uri`; None if it is empty."""
        return parse_source(self.uri) if self.uri else None


class EngineSpec(Record, frozen=True, kw_only=True):
    """Engine settings that all nodes share, so that their KV is interchangeable."""

    kind: Annotated[
        EngineKind, Meta(description="Kind of engine. torch: the real one. sim: a simulated one.")
    ] = "torch"
    dtype: Annotated[
        DType,
        Meta(
            description="Data type of computation and KV: bfloat16, float32, or auto, where each"
            " node decides. Nodes with different types exchange no KV."
        ),
    ] = "auto"
    batch_invariant: (
        Annotated[
            bool,
            Meta(
                description="Compute a token's bits from the tokens before it alone, whatever the"
                " batch: --batch-invariant on (true) or off (false). Default: auto, on with cpu and"
                " off with cuda. Nodes with and without it exchange no KV."
            ),
        ]
        | None
    ) = None
    block_size: Annotated[int, Meta(ge=1, description="Tokens per KV block.")] = 16
    chunk_blocks: (
        Annotated[int, Meta(ge=1, description="KV blocks per value in the store.")] | None
    ) = None
    max_model_len: (
        Annotated[int, Meta(ge=1, description="Maximum length of prompt plus answer, in tokens.")]
        | None
    ) = None
    start_timeout_seconds: (
        Annotated[
            int,
            Meta(
                ge=10,
                description="Seconds from a node's start to its first successful /ready, after"
                " which it is restarted. Default: 1800; with a memory limit and no GPU 120 +"
                " limit / 50 MiB, but at least 600.",
            ),
        ]
        | None
    ) = None
    extra_args: Annotated[
        tuple[NodeFlag, ...],
        Meta(
            max_length=64,
            description="More flags of `baton prefill` and `baton decode`, each as --NAME=VALUE.",
        ),
    ] = ()


class RoleSpec(Record, frozen=True, kw_only=True):
    """The nodes of one role."""

    replicas: Annotated[
        int,
        Meta(
            ge=0,
            le=MOST_NODES,
            description="Number of nodes of this role. With `autoscaling`, the initial number.",
        ),
    ] = 1
    resources: Annotated[
        Resources,
        Meta(
            description="Resources of the container `node`. With a GPU limit the node uses CUDA."
            " Default: requests of 1 CPU and 1Gi of memory, and ephemeral storage of 512Mi with a"
            " limit of 5Gi, in addition to model.storage."
        ),
    ] = Resources()
    pod_template: Annotated[
        PodTemplate,
        Meta(
            description="Merged over the operator's pod template. Lists whose items have a name"
            " are merged by name, volumeMounts by mountPath, tolerations by key. Everything else"
            " is replaced."
        ),
    ] = field(default_factory=dict)


class ServiceSpec(Record, frozen=True, kw_only=True):
    """The router's Service."""

    type: Annotated[
        ServiceType, Meta(description="Type of the Service: ClusterIP, NodePort or LoadBalancer.")
    ] = "ClusterIP"
    port: Annotated[int, Meta(ge=1, le=65535, description="Port to which clients connect.")] = 8000
    annotations: Annotated[Annotations, Meta(description="Annotations of the Service.")] = field(
        default_factory=dict
    )


class IngressSpec(Record, frozen=True, kw_only=True):
    """An Ingress in front of the router."""

    host: Annotated[HostName, Meta(description="Host name that clients use.")]
    class_name: Annotated[
        MaybeName, Meta(description="IngressClass. Default: the cluster's default class.")
    ] = ""
    tls_secret_name: Annotated[
        MaybeName, Meta(description="Secret with the host's certificate. Empty: no TLS.")
    ] = ""
    annotations: Annotated[Annotations, Meta(description="Annotations of the Ingress.")] = field(
        default_factory=dict
    )


class ParentRef(Record, frozen=True, kw_only=True):
    """A reference to a Gateway."""

    name: Annotated[Name, Meta(description="Name of the Gateway.")]
    namespace: Annotated[
        MaybeName,
        Meta(
            description="Namespace of the Gateway. Default: the pool's.",
            extra_json_schema=KEY_DEFAULT,
        ),
    ] = ""
    section_name: Annotated[
        MaybeName,
        Meta(
            description="Listener of the Gateway. Default: all listeners.",
            extra_json_schema=KEY_DEFAULT,
        ),
    ] = ""


class HTTPRouteSpec(Record, frozen=True, kw_only=True):
    """A Gateway API HTTPRoute to the router."""

    parent_refs: Annotated[
        tuple[ParentRef, ...],
        Meta(
            min_length=1,
            max_length=32,
            description="Gateways to which the route attaches.",
            extra_json_schema=keyed("name", "namespace", "sectionName"),
        ),
    ]
    hostnames: Annotated[
        tuple[HostName, ...],
        Meta(
            max_length=16,
            description="Host names of the route. Empty: those of the Gateways.",
            extra_json_schema=SET,
        ),
    ] = ()


class RouterSpec(Record, frozen=True, kw_only=True):
    """The routers, which clients connect to."""

    rules: ClassVar[tuple[CelRule, ...]] = (both("ingress", "httpRoute"),)

    replicas: Annotated[int, Meta(ge=1, le=MOST_ROUTERS, description="Number of router pods.")] = 1
    placement: Annotated[
        RouterPlacement,
        Meta(
            description="How a request's node is chosen. cost: the least predicted time. The"
            " other policies are for comparison. prefix: the node with the longest cached prefix"
            " of the prompt. least-request: the node with the fewest requests. round-robin: in"
            " turn. random: at random."
        ),
    ] = "cost"
    resources: Annotated[
        Resources,
        Meta(
            description="Resources of the container `router`. Default: requests of half a CPU"
            " and 512Mi of memory, and ephemeral storage of 64Mi with a limit of 1Gi."
        ),
    ] = Resources()
    pod_template: Annotated[PodTemplate, Meta(description="See prefill.podTemplate.")] = field(
        default_factory=dict
    )
    service: ServiceSpec = ServiceSpec()
    ingress: IngressSpec | None = None
    http_route: Annotated[
        HTTPRouteSpec | None,
        Meta(description="A Gateway API HTTPRoute to the router. Needs the Gateway API's CRDs."),
    ] = None
    api_keys_secret: Annotated[
        SecretFile | None,
        Meta(
            description="Secret key with lines of `TENANT KEY` or `TENANT sha256:HEX`. Default:"
            " clients need no API key."
        ),
    ] = None
    extra_args: Annotated[
        tuple[RouterFlag, ...],
        Meta(max_length=64, description="More flags of `baton router`, each as --NAME=VALUE."),
    ] = ()

    @property
    def request_s(self) -> int:
        """Time limit of a request in seconds, rounded up, from --request-timeout in `extra_args`:
        the spec has no field for it. As in the router, the last flag wins. With a value that is
        not a number no router starts, so any result will do."""
        given = [
            flag.removeprefix(_REQUEST_FLAG)
            for flag in self.extra_args
            if flag.startswith(_REQUEST_FLAG)
        ]
        try:
            seconds = float(given[-1]) if given else float(REQUEST_S)
        except ValueError:
            return REQUEST_S
        return math.ceil(seconds) if math.isfinite(seconds) and seconds > 0 else REQUEST_S


class NetworkPolicySpec(Record, frozen=True, kw_only=True):
    """Who may reach the pool's pods. The network plugin must enforce NetworkPolicies."""

    enabled: Annotated[bool, Meta(description="Create NetworkPolicies.")] = True
    clients: Annotated[
        tuple[Peer, ...],
        Meta(
            max_length=32,
            description="NetworkPolicyPeers that may reach the router. Empty: everyone may.",
        ),
    ] = ()
    monitoring: Annotated[
        tuple[Peer, ...],
        Meta(
            max_length=32,
            description="NetworkPolicyPeers that may reach /metrics of nodes and routers.",
        ),
    ] = ()


class RolloutSpec(Record, frozen=True, kw_only=True):
    """How nodes of a new revision replace those of an old one."""

    max_drain_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="Seconds for which an old node's requests may continue if no new"
                " node can take them over because their KV is not interchangeable. Default: the"
                " routers' --request-timeout, 600.",
            ),
        ]
        | None
    ) = None
    surge: Annotated[
        int,
        Meta(
            ge=1,
            le=MOST_NODES,
            description="Number of nodes by which a role may exceed its number in a roll-out.",
        ),
    ] = 1


class PoolSpec(Record, frozen=True, kw_only=True):
    """A pool: model, nodes, routers and KV store."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"self.engine.kind != 'torch' || {given('model.path')} || {given('model.uri')}",
            "names no model; write path or uri, or engine.kind: sim",
            field=".model",
        ),
        CelRule(
            # Each number's own bounds refuse a negative one.
            "self.prefill.replicas != 0 || self.decode.replicas != 0",
            "decode.replicas and prefill.replicas are 0, so no node can answer; write "
            "at least 1 in one of them",
            field=".decode.replicas",
        ),
        CelRule(
            "self.missingRolePolicy == 'aggregate' || (self.decode.replicas != 0"
            " && (self.handoff == 'never' || self.prefill.replicas != 0))",
            "a role that requests need has 0 replicas, so they would wait or fail forever; "
            "write aggregate, or at least 1 in decode.replicas and, without handoff: never, in "
            "prefill.replicas",
            field=".missingRolePolicy",
        ),
        CelRule(
            "self.missingRolePolicy == 'aggregate' || self.handoff == 'never'"
            " || !has(self.autoscaling) || !has(self.autoscaling.prefill)"
            " || self.autoscaling.prefill.min != 0",
            "0 prefill nodes could let requests wait or fail forever under this "
            "missingRolePolicy; write at least 1, or missingRolePolicy: aggregate",
            field=".autoscaling.prefill",
        ),
        CelRule(
            "self.kvStore.sharing == 'pool' || has(self.router.apiKeysSecret)",
            "needs API keys to tell tenants apart; write router.apiKeysSecret, or sharing: pool",
            field=".kvStore.sharing",
        ),
    )

    model: ModelSpec = ModelSpec()
    engine: EngineSpec = EngineSpec()
    prefill: Annotated[
        RoleSpec, Meta(description="Nodes that compute prompts for decode nodes.")
    ] = RoleSpec()
    decode: Annotated[RoleSpec, Meta(description="Nodes that generate answers.")] = RoleSpec()
    router: RouterSpec = RouterSpec()
    kv_store: KVStoreSpec = KVStoreSpec()
    autoscaling: Annotated[
        AutoscalingSpec | None,
        Meta(description="Who sets the number of nodes. Default: the roles' `replicas`."),
    ] = None
    handoff: Annotated[
        Handoff,
        Meta(
            description="When a prefill node computes a decode node's prompt. auto: if the "
            "hand-off costs little time. always, never: regardless of the time."
        ),
    ] = "auto"
    missing_role_policy: Annotated[
        MissingRole,
        Meta(
            description="What happens to new requests while a role has no ready node."
            " aggregate: the other role does its work. queue: they wait for a node. fail: they"
            " fail."
        ),
    ] = "aggregate"
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    rollout: RolloutSpec = RolloutSpec()
    gpu_budget: (
        Annotated[
            int,
            Meta(
                ge=1,
                le=100_000,
                description="Maximum number of GPUs that all nodes hold together, also in"
                " roll-outs: the GPUs among a node's limits, times the number of nodes. Default:"
                " no maximum.",
            ),
        ]
        | None
    ) = None
    paused: Annotated[
        bool, Meta(description="While true, the operator changes none of the pool's objects.")
    ] = False

    def __post_init__(self) -> None:
        if self.engine.kind == "torch" and not self.model.path and not self.model.uri:
            raise ValueError("model: names no model; write path or uri, or engine.kind: sim")

    @property
    def model_name(self) -> str:
        """The model's name in the API."""
        source = self.model.source
        last = source.name if source else self.model.path.rstrip("/").rsplit("/", 1)[-1]
        return self.model.name or last or self.engine.kind

    def role(self, role: Role) -> RoleSpec:
        return {"prefill": self.prefill, "decode": self.decode}[role]


class SpecError(Exception):
    """The spec is invalid. Retrying is useless until the user edits the pool."""


class Images(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Image references with tags. `redis` holds redis-server or Valkey, version 7 or later. `sim`
    is for simulated nodes and has no torch; if it is "", `node` is used instead."""

    node: str
    router: str
    redis: str
    sim: str = ""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all pools of one operator share. `namespace` is the operator's own ("" outside
    a cluster): its pods may reach index and routers. An empty `pull_policy` means Kubernetes'
    default."""

    images: Images
    namespace: str = ""
    pull_policy: str = ""
    pull_secrets: tuple[str, ...] = ()


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Generated once per pool and stored in its Secret. Hex digits, so that a URL can hold them."""

    redis_password: str
    link_token: str
    tenant_secret: str

    def __repr__(self) -> str:
        return "Credentials(...)"

    def digest(self, *more: str) -> str:
        """A short hash of the credentials that every pod uses, and of `more` that only this one
        uses. It reveals none of them. Pods with another digest are replaced."""
        text = "\n".join((self.redis_password, self.link_token, *more))
        return hashlib.sha256(text.encode()).hexdigest()[:10]


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    namespace: str
    uid: str
    generation: int
    spec: PoolSpec
    installation: Installation
    credentials: Credentials

    @property
    def key(self) -> str:
        """The pool's name in Redis, which several namespaces may share."""
        return f"{self.namespace}.{self.name}"

    @property
    def node_image(self) -> str:
        images = self.installation.images
        return (self.spec.engine.kind == "sim" and images.sim) or images.node


def read_pool(
    resource: Mapping[str, Any], installation: Installation, credentials: Credentials
) -> Pool:
    """Raise SpecError with the field that is invalid."""
    metadata = resource["metadata"]
    name = metadata["name"]
    if POOL_NAME.fullmatch(name) is None or len(name) > LONGEST_POOL_NAME:
        raise SpecError(
            f"metadata.name: {name!r} cannot start the names of Services; write at most "
            f"{LONGEST_POOL_NAME} of a-z, 0-9 and '-', starting with a letter"
        )
    spec = read_spec(resource.get("spec", {}))
    _check_pod_templates(spec)
    return Pool(
        name=name,
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        spec=spec,
        installation=installation,
        credentials=credentials,
    )


def _check_pod_templates(spec: PoolSpec) -> None:
    """Reject labels and annotations with our prefix, because selectors, policies and roll-outs use
    them, and names of containers that do not exist."""
    managed = spec.kv_store.managed
    templates = {
        "prefill": spec.prefill.pod_template,
        "decode": spec.decode.pod_template,
        "router": spec.router.pod_template,
        "kvStore.managed": managed.pod_template if managed is not None else {},
    }
    for part, template in templates.items():
        _check_kept(f"spec.{part}.podTemplate", template, "metadata")
        _check_containers(part, template, isinstance(spec.model.source, HubModel))
        metadata = template.get("metadata")
        # The API server rejects anything that is not a mapping.
        metadata = metadata if isinstance(metadata, Mapping) else {}
        for kind in ("labels", "annotations"):
            _check_kept(f"spec.{part}.podTemplate.metadata", metadata, kind)
            entries = metadata.get(kind)
            names = entries if isinstance(entries, Mapping) else ()
            ours = next((name for name in names if name.startswith(OWN_PREFIX)), None)
            if ours is not None:
                raise SpecError(
                    f"spec.{part}.podTemplate.metadata.{kind}: {ours!r} is set by the operator; "
                    f"write names that do not start with {OWN_PREFIX}"
                )


_CONTAINERS = {
    "prefill": ("node",),
    "decode": ("node",),
    "router": ("router",),
    "kvStore.managed": ("redis",),
}


def _check_containers(part: str, template: Mapping[str, Any], fetches: bool) -> None:
    """Reject a container without an image whose name is none of ours: it can only be a slip. One
    with an image is the user's own."""
    spec = template.get("spec")
    ours = {
        "containers": _CONTAINERS[part],
        "initContainers": (FETCH_CONTAINER,) if fetches and part in ROLES else (),
    }
    for kind, names in ours.items():
        given = spec.get(kind) if isinstance(spec, Mapping) else None
        for item in given if isinstance(given, list) else ():
            name = item.get("name") if isinstance(item, Mapping) else None
            if not isinstance(name, str) or name in names or item.get("image"):
                continue
            known = " or ".join(names)
            write = f"write {known}, or give" if known else "there is none to change; give"
            raise SpecError(
                f"spec.{part}.podTemplate.spec.{kind}: {name!r} is no container of the operator's "
                f"and has no image; {write} a container of your own an image"
            )


def _check_kept(field: str, parent: Mapping[str, Any], key: str) -> None:
    """Reject null, which would remove what the operator set there."""
    if key in parent and parent[key] is None:
        raise SpecError(
            f"{field}.{key}: null would remove a value that the operator sets; leave it out, or "
            f"write names that do not start with {OWN_PREFIX}"
        )


def read_spec(spec: Any) -> PoolSpec:
    """Raise SpecError if it is not a valid spec."""
    try:
        return msgspec.convert(spec, PoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(_explain(str(error), spec, error.__cause__ is not None)) from error


_LOCATED = re.compile(r"(?P<what>.*?)(?: - at .*?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def _explain(message: str, spec: Any, ours: bool) -> str:
    """An error of msgspec, or of a __post_init__ (`ours`), as field, value and remedy."""
    located = _LOCATED.fullmatch(message)
    assert located is not None, message
    what, path = located["what"], located["path"] or ""
    field = f"spec{path}"
    if ours:
        return f"{field}.{what}"
    if key := _MISSING.fullmatch(what):
        return f"{field}.{key[1]}: missing"
    steps = re.findall(r"[^.\[\]]+", path)
    for step in steps:
        spec = spec[step] if isinstance(spec, Mapping) else spec[int(step)]
    # A value in the place of a URL may contain a password.
    value = "the value" if "@" in repr(spec) else repr(spec)
    return f"{field}: {value} is invalid: {what[0].lower()}{what[1:]}{_choices(steps)}"


def _hint(steps: list[str]) -> Any:
    """The type at a path of camelCase keys."""
    hint: Any = PoolSpec
    for step in steps:
        if step.isdigit():
            continue  # an item of a list: the list's type contains the item's
        [record] = _records(hint)
        hint = next(f.type for f in msgspec.structs.fields(record) if f.encode_name == step)
    return hint


def _records(hint: Any) -> list[type[Record]]:
    """All records in a type: X, X | None, tuple[X, ...], with or without Metas, at any depth."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return [hint]
    return [record for part in typing.get_args(hint) for record in _records(part)]


def _choices(steps: list[str]) -> str:
    hint = _hint(steps)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    literal = typing.get_origin(hint) is Literal
    return f"; write {' or '.join(typing.get_args(hint))}" if literal else ""
