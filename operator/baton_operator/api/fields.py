"""Field types of the API, with bounds and with CEL rules that the API server checks.

In: nothing. Out: annotated types and base records for the specs; `crd` puts their rules into the
schema. A rule's message says what to write instead; the API server prefixes it with the field's
path and value. Bounds are wide: the API server needs them to estimate the cost of a rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, ClassVar

import msgspec
from kubernetes.utils.quantity import parse_quantity
from msgspec import Meta, field

# Key of a value's rules in its Meta.extra.
RULES = "rules"


class CelRule(msgspec.Struct, frozen=True):
    """`cel` sees the value as `self` and is true if the value is valid. `field` (".name") is the
    child field that the message is about, or "" for the value itself."""

    cel: str
    message: str
    field: str = ""


def ruled(*rules: CelRule, **more: Any) -> Meta:
    """A Meta that carries rules."""
    return Meta(extra={RULES: rules}, **more)


def given(path: str) -> str:
    """CEL: the string at `path` below `self` is present and not empty."""
    steps = path.split(".")
    known = [f"has(self.{'.'.join(steps[:count])})" for count in range(1, len(steps) + 1)]
    return f"({' && '.join(known)} && self.{path} != '')"


def both(first: str, second: str) -> CelRule:
    """A rule that allows at most one of two optional objects."""
    cel = f"!has(self.{first}) || !has(self.{second})"
    return CelRule(
        cel, f"must not be set together with {first}; write one of the two", field=f".{second}"
    )


def quoted(text: str) -> str:
    """A string, such as a pattern, as a CEL literal."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def matches(pattern: str, path: str = "") -> str:
    """CEL: the pattern matches the whole string, `self` or the field at `path` below it."""
    text = f"self.{path}" if path else "self"
    return f"{text}.matches({quoted(f'^(?:{pattern})$')})"


# The API server's syntax. The client's parser alone would also accept 1_0, NaN and 1e999999999.
_QUANTITY = re.compile(
    r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)


def quantity_bytes(quantity: int | str) -> int:
    """A Kubernetes quantity as an integer, rounded up. Raise ValueError if it is not one."""
    if _QUANTITY.fullmatch(str(quantity)) is None:
        raise ValueError(f"{quantity!r} is not a quantity; write 1Gi, 512Mi or a number of bytes")
    number: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]
    return math.ceil(number)


def check_quantity(name: str, quantity: int | str) -> None:
    """Raise ValueError, prefixed with the field's name; for a __post_init__."""
    try:
        quantity_bytes(quantity)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# Flags of nodes and routers that the operator sets, so `extraArgs` may not contain them: the last
# of two equal flags wins, and a pool breaks if its nodes listen on another port than its Services
# expect. `kv-shards` is in the list because a pool breaks if its nodes differ in it. `device` is
# not, although the operator sets it for a GPU limit: a GPU may also come from the podTemplate or
# from a resource claim, and only the user knows about those.
#
# Flags with a secret: pods get these, and a router's tenant-secret, from the environment.
_SECRET = ("redis-username", "redis-password", "link-token")
_PROCESS = (
    "host",
    "port",
    "pool",
    "json-logs",
    "drain-timeout",
    "redis-index",
    "served-model-name",
)

NODE_FLAGS = (
    *_PROCESS,
    *_SECRET,
    "node",
    "address",
    "revision",
    "redis-data",
    "engine",
    "model",
    "dtype",
    "batch-invariant",
    "block-size",
    "chunk-blocks",
    "kv-shards",
    "max-model-len",
    "start-timeout",
)
ROUTER_FLAGS = (
    *_PROCESS,
    *_SECRET,
    "tenant-secret",
    "handoff",
    "missing-role",
    "api-keys",
    "sharing",
    "wake-wait",
    "placement",
)


LONGEST_NAME = 253
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_NOT_A_NAME = "not a Kubernetes name; write lowercase letters, digits, '-' and '.', such as my-name"
_NOT_A_KEY = "not a key of a Secret; write letters, digits and any of . _ -, such as api-keys"
_NOT_A_HOST = "not a host name; write one such as llm.example.com or *.example.com, without a port"
# Must equal what baton_protocol.model_source parses; a test compares them.
_HUB_WORD = "[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB = rf"hf://({_HUB_WORD}/)?{_HUB_WORD}(@{_HUB_WORD}(/{_HUB_WORD})*)?"
_CLAIM = r"pvc://[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(/([^/\pC\pZ]| )+)*/*"


def _names(pattern: str, message: str, longest: int, optional: bool = False) -> Meta:
    cel = f"self == '' || {matches(pattern)}" if optional else matches(pattern)
    return ruled(CelRule(cel, message), max_length=longest)


def check_name(field: str, name: str) -> None:
    """Raise ValueError for an invalid object name: it could be a path to another object."""
    if re.fullmatch(_SUBDOMAIN, name, re.ASCII) is None or len(name) > LONGEST_NAME:
        raise ValueError(f"{field}: {name[:LONGEST_NAME]!r} is {_NOT_A_NAME}")


Name = Annotated[str, _names(_SUBDOMAIN, _NOT_A_NAME, LONGEST_NAME)]
MaybeName = Annotated[str, _names(_SUBDOMAIN, _NOT_A_NAME, LONGEST_NAME, optional=True)]
SecretKey = Annotated[
    str,
    ruled(
        CelRule(
            f"{matches('[-._a-zA-Z0-9]+')} && !self.startsWith('..') && self != '.'", _NOT_A_KEY
        ),
        max_length=253,
    ),
]
HostName = Annotated[str, _names(rf"(\*\.)?{_SUBDOMAIN}", _NOT_A_HOST, 253)]

Folder = Annotated[
    str,
    ruled(
        CelRule(
            "self == '' || self.startsWith('/')",
            "not an absolute path; write one that starts with '/', such as /models/NAME",
        ),
        max_length=1024,
    ),
]
ModelUri = Annotated[
    str,
    ruled(
        CelRule(
            "self == '' || self.startsWith('hf://') || self.startsWith('pvc://')",
            "not a known source; write hf://ORG/NAME[@REVISION] or pvc://CLAIM/FOLDER",
        ),
        CelRule(
            f"!self.startsWith('hf://') || ({matches(_HUB)} && !self.contains('--')"
            f" && !self.contains('..') && {matches('hf://[^@]{1,96}(@.*)?')})",
            "not a hub repository; write hf://ORG/NAME[@REVISION], such as hf://Qwen/Qwen3-0.6B",
        ),
        CelRule(
            f"!self.startsWith('pvc://') || ({matches(_CLAIM)}"
            rf" && !self.matches({quoted(r'/[.]{1,2}(/|$)')}))",
            "not a folder of a PersistentVolumeClaim; write pvc://CLAIM/FOLDER, without empty, '.'"
            " and '..' parts",
        ),
        max_length=1024,
    ),
]
ModelName = Annotated[
    str,
    ruled(
        CelRule(
            f"self == '' || {matches('[A-Za-z0-9][A-Za-z0-9._:/@+-]*')}",
            "contains characters that are not allowed; write letters, digits and any "
            "of . _ : / @ + -, such as org/model",
        ),
        max_length=256,
    ),
]
RedisUrl = Annotated[
    str,
    ruled(
        CelRule(
            # The record rejects a URL with a login: this rule's error would repeat the password.
            "self.contains('@') || "
            + matches(
                r"rediss?://([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
                r"(:[1-9][0-9]{0,4})?(/[0-9]{0,4})?"
            ),
            "not the URL of a Redis server; write redis://HOST[:PORT][/DB], or rediss://... "
            "for TLS, one per item",
        ),
        max_length=512,
    ),
]


def _flag(taken: tuple[str, ...]) -> Meta:
    names = "|".join(taken)
    return ruled(
        CelRule(
            f"self.matches({quoted('^--[a-z][a-z0-9-]*(=|$)')})",
            "not a single flag; write --NAME=VALUE or --NAME",
        ),
        CelRule(
            f"!self.matches({quoted(f'^--(no-)?({names})(=|$)')})",
            "the operator sets this flag; leave it out and write the field of the spec instead",
        ),
        max_length=1024,
    )


NodeFlag = Annotated[str, _flag(NODE_FLAGS)]
RouterFlag = Annotated[str, _flag(ROUTER_FLAGS)]

# Most pods of one kind. The API server can estimate rules over them, a slip of the finger is
# refused, and no cluster has more.
MOST_NODES = 10_000
MOST_ROUTERS = 1_000

# A number of objects in a status.
Count = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int32"})]

# Kubernetes limits the total size of an object's annotations.
Annotations = Annotated[dict[str, Annotated[str, Meta(max_length=256 * 1024)]], Meta(max_length=64)]

# Lists to which several server-side appliers may add items. All other lists have one owner. A set
# holds strings: the API server cannot merge objects without keys, such as peers.
SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}


def keyed(*keys: str) -> dict[str, Any]:
    """List type of objects that these fields identify. An optional key field needs a default in
    the schema: `KEY_DEFAULT`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


KEY_DEFAULT: dict[str, Any] = {"default": ""}


# Not validated below these keys: Kubernetes validates them when the pods are created.
def _open(record: str, *keys: str) -> dict[str, Any]:
    part = {
        "type": "object",
        "description": f"See {record}.",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    return {"properties": dict.fromkeys(keys, part)}


PodTemplate = Annotated[
    dict[str, Any], Meta(extra_json_schema=_open("PodTemplateSpec", "metadata", "spec"))
]
Peer = Annotated[
    dict[str, Any],
    ruled(
        CelRule(
            "has(self.podSelector) || has(self.namespaceSelector) || has(self.ipBlock)",
            "selects no peer; write podSelector, namespaceSelector or ipBlock, as in a "
            "NetworkPolicy",
        ),
        CelRule(
            "!has(self.ipBlock) || (!has(self.podSelector) && !has(self.namespaceSelector))",
            "must not be set together with a selector; write two peers, one with "
            "ipBlock and one with the selectors",
            field=".ipBlock",
        ),
        extra_json_schema=_open("NetworkPolicyPeer", "podSelector", "namespaceSelector", "ipBlock"),
    ),
]

Quantity = Annotated[
    int | Annotated[str, Meta(max_length=24)],
    ruled(
        CelRule(
            "isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('0')) >= 0",
            "not a Kubernetes quantity; write a number with or without a unit, such as 2, "
            "500m, 512Mi or 16Gi",
        ),
    ),
]
Quantities = Annotated[dict[str, Quantity], Meta(max_length=32)]


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the spec. Each subclass repeats `frozen` for mypy. Unknown fields are ignored: the
    CRD may be newer than the operator, and the API server already rejects typos. `whole`: one
    server-side applier owns all fields of the record, so two appliers cannot mix theirs."""

    rules: ClassVar[tuple[CelRule, ...]] = ()
    whole: ClassVar[bool] = False


class SecretRef(Record, frozen=True, kw_only=True):
    """A Secret in the pool's namespace."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="Name of the Secret.")]

    def __post_init__(self) -> None:
        check_name("name", self.name)


class SecretFile(Record, frozen=True, kw_only=True):
    """One key of a Secret in the pool's namespace, mounted as a file."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="Name of the Secret.")]
    key: Annotated[SecretKey, Meta(description="Key in the Secret.")]


class Resources(Record, frozen=True, kw_only=True):
    """Resource requests and limits, as in Kubernetes. A resource that is in neither list keeps
    its default, if it has one."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name,"
            " !(name in self.limits)"
            " || !isQuantity(string(self.requests[name]))"
            " || !isQuantity(string(self.limits[name]))"
            " || quantity(string(self.requests[name]))"
            ".compareTo(quantity(string(self.limits[name]))) <= 0)",
            "a request exceeds its limit; write a request that is at most the limit of the "
            "same name",
            field=".requests",
        ),
    )

    requests: Annotated[Quantities, Meta(description="Requested amount per resource.")] = field(
        default_factory=dict
    )
    limits: Annotated[Quantities, Meta(description="Maximum amount per resource.")] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for kind, quantities in (("requests", self.requests), ("limits", self.limits)):
            for name, quantity in quantities.items():
                check_quantity(f"{kind}.{name}", quantity)


def is_gpu(resource: str) -> bool:
    """Whether the resource is a GPU: nvidia.com/gpu, an NVIDIA slice or shared GPU, or
    amd.com/gpu. One slice or share counts as one GPU."""
    return resource.startswith("nvidia.com/") or resource.endswith("/gpu")


def gpus_of(limits: Mapping[str, int | str]) -> int:
    """The number of GPUs of one node with these limits."""
    return sum(quantity_bytes(amount) for name, amount in limits.items() if is_gpu(name))


def gpus_of_pod(spec: Mapping[str, Any]) -> int:
    """The number of GPUs of a pod spec: of all its containers, including the podTemplate's own."""
    containers = spec.get("containers") or ()
    limits = [(container.get("resources") or {}).get("limits") or {} for container in containers]
    return sum(gpus_of(limit) for limit in limits)
