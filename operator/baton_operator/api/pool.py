"""One InferencePool as all folders see it: whose it is, what it wants, what serves it.

In: the resource as the API gives it, how the operator was installed, the pool's secrets.
Out: a `Pool`, or one line that says what to write instead.

SpecError   the pool is not what can be built; one line: field, offending value, what to write

PoolSpec holds what a user may write in `spec`: only fields that something obeys. Keys are camelCase
in YAML, snake_case here. The CRD is generated from these records (see `crd`), defaults and
descriptions included. What needs more than a type is a `CelRule`, of a value (`fields`) or of a
record: the API server refuses by it. `__post_init__` repeats only what nothing could be built from,
since a pool may have been stored before a rule was.
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
from baton_operator.names import LONGEST_POOL_NAME, OWN_PREFIX, POOL_NAME
from baton_protocol.model_source import ModelSource, parse_source
from baton_protocol.store import Role

EngineKind = Literal["torch", "sim"]
DType = Literal["auto", "float32", "bfloat16"]
Handoff = Literal["auto", "always", "never"]
MissingRole = Literal["aggregate", "queue", "fail"]
RouterPlacement = Literal["cost", "prefix", "least-request", "round-robin", "random"]
ServiceType = Literal["ClusterIP", "NodePort", "LoadBalancer"]
REQUEST_S = 600  # a router's own default
_REQUEST_FLAG = "--request-timeout="


class ModelCache(Record, frozen=True, kw_only=True):
    """Where a fetched model is kept."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"{given('claimName')} != {given('hostPath')}",
            "says no place, or two; write one of claimName and hostPath, or leave cache out: then"
            " each pod fetches its own",
        ),
    )

    claim_name: Annotated[
        MaybeName,
        Meta(description="a PersistentVolumeClaim that all nodes can write: fetched once"),
    ] = ""
    host_path: Annotated[
        Folder,
        Meta(
            description="a folder of the cluster's nodes: fetched once on each (not `restricted`)"
        ),
    ] = ""


class ModelSpec(Record, frozen=True, kw_only=True):
    """The model that all nodes serve."""

    _fetched: ClassVar[str] = "(has(self.uri) && self.uri.startsWith('hf://'))"
    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"!{given('path')} || !{given('uri')}",
            "given beside path; write one of the two",
            field=".uri",
        ),
        CelRule(
            f"!has(self.secretRef) || {_fetched}",
            "only a model from a hub needs a login; write uri: hf://ORG/NAME, or leave it out",
            field=".secretRef",
        ),
        CelRule(
            f"!has(self.cache) || {_fetched}",
            "only a model from a hub is fetched; write uri: hf://ORG/NAME, or leave it out",
            field=".cache",
        ),
        CelRule(
            f"!has(self.storage) || ({_fetched} && !has(self.cache))",
            "only a model that each pod fetches for itself takes the pod's storage; write uri:"
            " hf://ORG/NAME without cache, or leave it out",
            field=".storage",
        ),
    )

    path: Annotated[
        Folder,
        Meta(description="a Hugging Face folder in the node's container: image or podTemplate"),
    ] = ""
    uri: Annotated[
        ModelUri,
        Meta(description="pvc://CLAIM/FOLDER, or hf://ORG/NAME[@REVISION], which is fetched"),
    ] = ""
    name: Annotated[
        ModelName,
        Meta(description="what clients call the model; default: the folder's last component"),
    ] = ""
    secret_ref: Annotated[
        SecretRef | None, Meta(description="hf:// only: its key `token` logs in to the hub")
    ] = None
    cache: Annotated[ModelCache | None, Meta(description="hf:// only: where the model is kept")] = (
        None
    )
    storage: (
        Annotated[
            Quantity,
            Meta(
                description="hf:// without cache: ephemeral storage that each node's pod asks for"
                " and gives the fetched model, which may not be larger; default: 20Gi, or 1Gi for"
                " a simulated engine, which fetches no weights"
            ),
        ]
        | None
    ) = None

    def __post_init__(self) -> None:
        if self.storage is not None:
            check_quantity("storage", self.storage)
        if self.path and self.uri:
            raise ValueError("uri: given beside path; write one of the two")
        if self.uri:
            try:
                parse_source(self.uri)
            except ValueError as error:
                raise ValueError(f"uri: {error}") from error

    @property
    def source(self) -> ModelSource | None:
        """Where `uri` says the model is."""
        return parse_source(self.uri) if self.uri else None


class EngineSpec(Record, frozen=True, kw_only=True):
    """Numbers that all nodes share: with other ones their KV would not be interchangeable."""

    kind: Annotated[
        EngineKind, Meta(description="torch: the real engine; sim: a simulated one")
    ] = "torch"
    dtype: Annotated[
        DType,
        Meta(
            description="what nodes compute in and keep KV in: bfloat16, float32, or auto: each"
            " node decides. Nodes that differ exchange no KV"
        ),
    ] = "auto"
    block_size: Annotated[int, Meta(ge=1, description="tokens per KV block")] = 16
    chunk_blocks: Annotated[int, Meta(ge=1, description="blocks moved as one value")] | None = None
    max_model_len: Annotated[int, Meta(ge=1, description="prompt + answer, tokens")] | None = None
    start_timeout_seconds: (
        Annotated[
            int,
            Meta(
                ge=10,
                description="from a node's start to its first /ready, or it is restarted; default:"
                " 1800, or with a memory limit and no GPU 120 + limit / 50 MiB, at least 600",
            ),
        ]
        | None
    ) = None
    extra_args: Annotated[
        tuple[NodeFlag, ...],
        Meta(max_length=64, description="more flags of `baton prefill|decode`: --NAME=VALUE"),
    ] = ()


class RoleSpec(Record, frozen=True, kw_only=True):
    """The nodes of one role."""

    replicas: Annotated[
        int, Meta(ge=0, description="nodes of this role; with `autoscaling` how many at first")
    ] = 1
    resources: Annotated[
        Resources,
        Meta(
            description="of the container `node`; a GPU limit makes it use CUDA. Default: requests"
            " of a CPU and 1Gi of memory, and ephemeral storage of 512Mi, at most 5Gi, beside what"
            " model.storage says"
        ),
    ] = Resources()
    pod_template: Annotated[
        PodTemplate,
        Meta(
            description="merged over the pods' template: lists whose items have a name by name,"
            " volumeMounts by mountPath, tolerations by key, all else replaced"
        ),
    ] = field(default_factory=dict)


class ServiceSpec(Record, frozen=True, kw_only=True):
    """The router's Service."""

    type: Annotated[ServiceType, Meta(description="ClusterIP, NodePort or LoadBalancer")] = (
        "ClusterIP"
    )
    port: Annotated[int, Meta(ge=1, le=65535, description="where clients connect")] = 8000
    annotations: Annotated[Annotations, Meta(description="of the Service")] = field(
        default_factory=dict
    )


class IngressSpec(Record, frozen=True, kw_only=True):
    """An Ingress in front of the router."""

    host: Annotated[HostName, Meta(description="the host name that clients use")]
    class_name: Annotated[MaybeName, Meta(description="default: the cluster's own")] = ""
    tls_secret_name: Annotated[
        MaybeName, Meta(description="a Secret with the host's certificate; none: no TLS")
    ] = ""
    annotations: Annotated[Annotations, Meta(description="of the Ingress")] = field(
        default_factory=dict
    )


class ParentRef(Record, frozen=True, kw_only=True):
    """A Gateway."""

    name: Annotated[Name, Meta(description="the Gateway's name")]
    namespace: Annotated[
        MaybeName, Meta(description="default: the pool's", extra_json_schema=KEY_DEFAULT)
    ] = ""
    section_name: Annotated[
        MaybeName,
        Meta(description="a listener; default: all of them", extra_json_schema=KEY_DEFAULT),
    ] = ""


class HTTPRouteSpec(Record, frozen=True, kw_only=True):
    """A route of the Gateway API to the router."""

    parent_refs: Annotated[
        tuple[ParentRef, ...],
        Meta(
            min_length=1,
            max_length=32,
            description="the Gateways",
            extra_json_schema=keyed("name", "namespace", "sectionName"),
        ),
    ]
    hostnames: Annotated[
        tuple[HostName, ...],
        Meta(max_length=16, description="none: those of the Gateways", extra_json_schema=SET),
    ] = ()


class RouterSpec(Record, frozen=True, kw_only=True):
    """The gateway that clients talk to."""

    rules: ClassVar[tuple[CelRule, ...]] = (both("ingress", "httpRoute"),)

    replicas: Annotated[int, Meta(ge=1, description="routers")] = 1
    workers: Annotated[
        int,
        Meta(ge=1, le=64, description="processes of each, about one per CPU that it is given"),
    ] = 1
    placement: Annotated[
        RouterPlacement,
        Meta(
            description="how a request's node is chosen. cost: by the least predicted time. The"
            " others are for comparing. prefix: by what it holds of the prompt; least-request: by"
            " the fewest requests; round-robin: in turns; random"
        ),
    ] = "cost"
    resources: Annotated[
        Resources,
        Meta(
            description="of the container `router`; default: requests of half a CPU and 512Mi of"
            " memory per worker, ephemeral storage of 64Mi, at most 1Gi"
        ),
    ] = Resources()
    pod_template: Annotated[PodTemplate, Meta(description="as prefill.podTemplate")] = field(
        default_factory=dict
    )
    service: ServiceSpec = ServiceSpec()
    ingress: IngressSpec | None = None
    http_route: Annotated[
        HTTPRouteSpec | None, Meta(description="needs the Gateway API's CRDs")
    ] = None
    api_keys_secret: Annotated[
        SecretFile | None,
        Meta(description="lines of `TENANT KEY` or `TENANT sha256:HEX`; none: no key is asked for"),
    ] = None
    extra_args: Annotated[
        tuple[RouterFlag, ...],
        Meta(max_length=64, description="more flags of `baton router`: --NAME=VALUE"),
    ] = ()

    @property
    def request_s(self) -> int:
        """For how long a request may go on, rounded up: the pool has no field of its own for it. Of
        flags the last one counts, as for the router; one that is no number lets no router start."""
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
    """Who may reach the pool's pods, where the network plugin obeys."""

    enabled: Annotated[bool, Meta(description="make NetworkPolicies")] = True
    clients: Annotated[
        tuple[Peer, ...],
        Meta(
            max_length=32,
            description="NetworkPolicyPeers that may reach the router; none given: everybody",
        ),
    ] = ()
    monitoring: Annotated[
        tuple[Peer, ...],
        Meta(
            max_length=32,
            description="NetworkPolicyPeers that may reach the nodes' and routers' /metrics",
        ),
    ] = ()


class RolloutSpec(Record, frozen=True, kw_only=True):
    """How nodes of an older spec give way to new ones."""

    max_drain_seconds: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="for how long an old node's requests may go on where no new one can"
                " take them over, as their KV is not interchangeable; default: the routers'"
                " --request-timeout, 600",
            ),
        ]
        | None
    ) = None
    surge: Annotated[
        int, Meta(ge=1, description="nodes that a role may have meanwhile beyond its number")
    ] = 1


class PoolSpec(Record, frozen=True, kw_only=True):
    """A whole pool: model, nodes, router and KV store."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            f"self.engine.kind != 'torch' || {given('model.path')} || {given('model.uri')}",
            "says no model; write path or uri, or engine.kind: sim",
            field=".model",
        ),
        CelRule(
            "self.prefill.replicas + self.decode.replicas > 0",
            "0, and prefill.replicas too: nobody could answer; write at least 1 in one of them",
            field=".decode.replicas",
        ),
        CelRule(
            "self.missingRolePolicy == 'aggregate' || (self.decode.replicas > 0"
            " && (self.handoff == 'never' || self.prefill.replicas > 0))",
            "requests would wait or fail for ever: a role that they need has 0 replicas; write"
            " aggregate, or at least 1 in decode.replicas and, without handoff: never, in"
            " prefill.replicas",
            field=".missingRolePolicy",
        ),
        CelRule(
            "self.missingRolePolicy == 'aggregate' || self.handoff == 'never'"
            " || !has(self.autoscaling) || !has(self.autoscaling.prefill)"
            " || self.autoscaling.prefill.min > 0",
            "0, and missingRolePolicy may let requests wait or fail for ever; write at least 1, or"
            " missingRolePolicy: aggregate",
            field=".autoscaling.prefill",
        ),
        CelRule(
            "self.kvStore.sharing == 'pool' || has(self.router.apiKeysSecret)",
            "nothing tells tenants apart; write router.apiKeysSecret, or sharing: pool",
            field=".kvStore.sharing",
        ),
    )

    model: ModelSpec = ModelSpec()
    engine: EngineSpec = EngineSpec()
    prefill: Annotated[
        RoleSpec, Meta(description="nodes that compute prompts for decode nodes")
    ] = RoleSpec()
    decode: Annotated[RoleSpec, Meta(description="nodes that generate answers")] = RoleSpec()
    router: RouterSpec = RouterSpec()
    kv_store: KVStoreSpec = KVStoreSpec()
    autoscaling: Annotated[
        AutoscalingSpec | None,
        Meta(description="who says how many nodes there are; none: the roles' `replicas`"),
    ] = None
    handoff: Annotated[
        Handoff,
        Meta(
            description="when a prefill node computes a decode node's prompt. auto: where that"
            " hardly costs time; always; never"
        ),
    ] = "auto"
    missing_role_policy: Annotated[
        MissingRole,
        Meta(
            description="what becomes of new requests while no node of a role is ready."
            " aggregate: the other role does its work; queue: they wait for a node; fail: they fail"
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
                description="GPUs that all nodes may hold together, in roll-outs too: those among"
                " their limits, times nodes; default: no bound",
            ),
        ]
        | None
    ) = None
    paused: Annotated[
        bool, Meta(description="leave everything as it is until this is false again")
    ] = False

    def __post_init__(self) -> None:
        if self.engine.kind == "torch" and not self.model.path and not self.model.uri:
            raise ValueError("model: says no model; write path or uri, or engine.kind: sim")

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        source = self.model.source
        last = source.name if source else self.model.path.rstrip("/").rsplit("/", 1)[-1]
        return self.model.name or last or self.engine.kind

    def role(self, role: Role) -> RoleSpec:
        return {"prefill": self.prefill, "decode": self.decode}[role]


class SpecError(Exception):
    """Final until the user edits the pool."""


class Images(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Full names with versions. `redis` is redis-server or Valkey's, version 7 or later. `sim` is
    for nodes that simulate their model and has no torch; "": `node`, which can do it too."""

    node: str
    router: str
    redis: str
    sim: str = ""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What all pools of one operator share. `namespace` is the operator's own ("" outside a
    cluster): its pods may reach index and routers. `pull_policy` "" leaves it to Kubernetes."""

    images: Images
    namespace: str = ""
    pull_policy: str = ""
    pull_secrets: tuple[str, ...] = ()


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Made once per pool and kept in its Secret. Hex digits, so that a URL can hold them."""

    redis_password: str
    link_token: str
    tenant_secret: str

    def __repr__(self) -> str:
        return "Credentials(...)"

    def digest(self, *more: str) -> str:
        """Names what every pod is made with, and `more` that only this one is, without telling it:
        pods made with others are replaced."""
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
        """The pool's name in Redis, which pools of other namespaces may share."""
        return f"{self.namespace}.{self.name}"

    @property
    def node_image(self) -> str:
        images = self.installation.images
        return (self.spec.engine.kind == "sim" and images.sim) or images.node


def read_pool(
    resource: Mapping[str, Any], installation: Installation, credentials: Credentials
) -> Pool:
    """Raise SpecError naming the field that cannot be obeyed."""
    metadata = resource["metadata"]
    name = metadata["name"]
    if POOL_NAME.fullmatch(name) is None or len(name) > LONGEST_POOL_NAME:
        raise SpecError(
            f"metadata.name: {name!r} cannot begin the names of services; write at most"
            f" {LONGEST_POOL_NAME} of a-z, 0-9 and '-', a letter first"
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
    """Selectors, policies and roll-outs go by our own labels and annotations."""
    managed = spec.kv_store.managed
    templates = {
        "prefill": spec.prefill.pod_template,
        "decode": spec.decode.pod_template,
        "router": spec.router.pod_template,
        "kvStore.managed": managed.pod_template if managed is not None else {},
    }
    for part, template in templates.items():
        _check_kept(f"spec.{part}.podTemplate", template, "metadata")
        metadata = template.get("metadata")
        # Other things than a mapping are for the API server to refuse.
        metadata = metadata if isinstance(metadata, Mapping) else {}
        for kind in ("labels", "annotations"):
            _check_kept(f"spec.{part}.podTemplate.metadata", metadata, kind)
            words = metadata.get(kind)
            names = words if isinstance(words, Mapping) else ()
            ours = next((name for name in names if name.startswith(OWN_PREFIX)), None)
            if ours is not None:
                raise SpecError(
                    f"spec.{part}.podTemplate.metadata.{kind}: {ours!r} is set by the operator;"
                    f" write names that do not begin with {OWN_PREFIX}"
                )


def _check_kept(field: str, parent: Mapping[str, Any], key: str) -> None:
    """null would remove what the operator wrote there."""
    if key in parent and parent[key] is None:
        raise SpecError(
            f"{field}.{key}: null would remove what the operator set; leave it out, or write names"
            f" that do not begin with {OWN_PREFIX}"
        )


def read_spec(spec: Any) -> PoolSpec:
    """Raise SpecError for what is not a spec."""
    try:
        return msgspec.convert(spec, PoolSpec)
    except msgspec.ValidationError as error:
        raise SpecError(_explain(str(error), spec, error.__cause__ is not None)) from error


_LOCATED = re.compile(r"(?P<what>.*?)(?: - at .*?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def _explain(message: str, spec: Any, ours: bool) -> str:
    """msgspec's words, or those of a __post_init__ (`ours`), as field, value, remedy."""
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
    # What is in the place of a URL may hold a password.
    value = "what is written" if "@" in repr(spec) else repr(spec)
    return f"{field}: {value} is wrong: {what[0].lower()}{what[1:]}{_choices(steps)}"


def _hint(steps: list[str]) -> Any:
    """The type at a path of keys in YAML's spelling."""
    hint: Any = PoolSpec
    for step in steps:
        if step.isdigit():
            continue  # a list's item: its type is in the list's
        [record] = _records(hint)
        hint = next(f.type for f in msgspec.structs.fields(record) if f.encode_name == step)
    return hint


def _records(hint: Any) -> list[type[Record]]:
    """Those in a type, however deep: X, X | None, tuple[X, ...], each with Metas or without."""
    if isinstance(hint, type) and issubclass(hint, Record):
        return [hint]
    return [record for part in typing.get_args(hint) for record in _records(part)]


def _choices(steps: list[str]) -> str:
    hint = _hint(steps)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    literal = typing.get_origin(hint) is Literal
    return f"; write {' or '.join(typing.get_args(hint))}" if literal else ""
