"""What a field of the API is: a type, bounds, and rules in CEL that the API server checks.

In: nothing. Out: annotated types and records for the specs; `crd` puts their rules into the schema.
A rule's message says what to write instead; the API server writes the field's path before it, and
the value behind the path. Bounds are wide: they are there because the API server wants to know
beforehand what checking a rule may cost.
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

# Where a Meta keeps the rules of its value.
RULES = "rules"


class CelRule(msgspec.Struct, frozen=True):
    """`cel` sees the value as `self` and is true where all is well. `field` (".name") is the one
    below it that the message speaks of; "" for the value itself."""

    cel: str
    message: str
    field: str = ""


def ruled(*rules: CelRule, **more: Any) -> Meta:
    """A value's Meta with rules."""
    return Meta(extra={RULES: rules}, **more)


def given(path: str) -> str:
    """CEL: there is a text at this path below `self`, and it is not empty."""
    steps = path.split(".")
    known = [f"has(self.{'.'.join(steps[:count])})" for count in range(1, len(steps) + 1)]
    return f"({' && '.join(known)} && self.{path} != '')"


def both(first: str, second: str) -> CelRule:
    """Two optional objects of which one at most is wanted."""
    cel = f"!has(self.{first}) || !has(self.{second})"
    return CelRule(cel, f"given beside {first}; write one of the two", field=f".{second}")


def quoted(text: str) -> str:
    """A text, such as a pattern, as CEL spells it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def matches(pattern: str, path: str = "") -> str:
    """CEL: the whole text matches, `self` or what is below it at that path."""
    text = f"self.{path}" if path else "self"
    return f"{text}.matches({quoted(f'^(?:{pattern})$')})"


# As the API server takes them. The client's parser alone would take 1_0, NaN and 1e999999999 too.
_QUANTITY = re.compile(
    r"\+?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?"
)


def quantity_bytes(quantity: int | str) -> int:
    """Kubernetes' quantity as a number, rounded up; raise ValueError."""
    if _QUANTITY.fullmatch(str(quantity)) is None:
        raise ValueError(f"{quantity!r} is no quantity; write 1Gi, 512Mi or bytes")
    number: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]
    return math.ceil(number)


def check_quantity(name: str, quantity: int | str) -> None:
    """For a __post_init__."""
    try:
        quantity_bytes(quantity)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# The flags of nodes and routers that the operator writes itself, so that `extraArgs` may not hold
# them: of two equal flags the last one counts, and a pool whose nodes listen elsewhere than its
# Services look is lost. So is one whose nodes do not agree about `kv-shards`, which is nobody's to
# write. Not in them is `device`, though the operator writes it for a GPU among the limits: a GPU
# may also come by the podTemplate or by a resource claim, and then only the user knows.
#
# Which of them say a secret: those come from the environment, as does a router's tenant-secret.
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
    "workers",
    "placement",
)


LONGEST_NAME = 253
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_NOT_A_NAME = "not a name of Kubernetes; write small letters, digits, '-' and '.', such as my-name"
_NOT_A_KEY = "not a key of a Secret; write letters, digits and any of . _ -, such as api-keys"
_NOT_A_HOST = "not a host name; write one such as llm.example.com or *.example.com, without a port"
# As baton_protocol.model_source reads them; a test compares.
_HUB_WORD = "[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_HUB = rf"hf://({_HUB_WORD}/)?{_HUB_WORD}(@{_HUB_WORD}(/{_HUB_WORD})*)?"
_CLAIM = r"pvc://[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(/([^/\pC\pZ]| )+)*/*"


def _names(pattern: str, message: str, longest: int, optional: bool = False) -> Meta:
    cel = f"self == '' || {matches(pattern)}" if optional else matches(pattern)
    return ruled(CelRule(cel, message), max_length=longest)


def check_name(field: str, name: str) -> None:
    """Raise ValueError for what is no name of an object: it may be a path to another one."""
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
            "not an absolute path; write one that begins with '/', such as /models/NAME",
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
            "not a repository of a hub; write hf://ORG/NAME[@REVISION], such as"
            " hf://Qwen/Qwen3-0.6B",
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
            "not one word; write letters, digits and any of . _ : / @ + -, such as org/model",
        ),
        max_length=256,
    ),
]
RedisUrl = Annotated[
    str,
    ruled(
        CelRule(
            # One with a login is refused by the record: here its text would be repeated.
            "self.contains('@') || "
            + matches(
                r"rediss?://([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
                r"(:[1-9][0-9]{0,4})?(/[0-9]{0,4})?"
            ),
            "not the URL of one Redis; write redis://HOST[:PORT][/DB], or rediss://... for TLS, one"
            " per item",
        ),
        max_length=512,
    ),
]


def _flag(taken: tuple[str, ...]) -> Meta:
    names = "|".join(taken)
    return ruled(
        CelRule(
            f"self.matches({quoted('^--[a-z][a-z0-9-]*(=|$)')})",
            "not a flag in one word; write --NAME=VALUE or --NAME",
        ),
        CelRule(
            f"!self.matches({quoted(f'^--(no-)?({names})(=|$)')})",
            "a flag that the operator sets; leave it out and write the spec's own field instead",
        ),
        max_length=1024,
    )


NodeFlag = Annotated[str, _flag(NODE_FLAGS)]
RouterFlag = Annotated[str, _flag(ROUTER_FLAGS)]

# How many there are of something, as a status says it.
Count = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int32"})]

# Kubernetes' own limit is one for all of an object's together.
Annotations = Annotated[dict[str, Annotated[str, Meta(max_length=256 * 1024)]], Meta(max_length=64)]

# Lists to which several appliers (server-side apply) may give items; all others are one applier's.
# A set holds texts: the API server cannot merge objects without keys, such as peers.
SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}


def keyed(*keys: str) -> dict[str, Any]:
    """A list of objects that these fields tell apart. One that may be left out needs a default in
    the schema: `KEY_DEFAULT`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


KEY_DEFAULT: dict[str, Any] = {"default": ""}


# Free below these keys: Kubernetes checks it when the pods are made.
def _open(record: str, *keys: str) -> dict[str, Any]:
    part = {
        "type": "object",
        "description": f"as in a {record}",
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
            "selects nothing; write podSelector, namespaceSelector or ipBlock, as in a"
            " NetworkPolicy",
        ),
        CelRule(
            "!has(self.ipBlock) || (!has(self.podSelector) && !has(self.namespaceSelector))",
            "given beside a selector; write two peers, one with ipBlock and one with the selectors",
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
            "not a quantity of Kubernetes; write a number with or without a unit, such as 2, 500m,"
            " 512Mi or 16Gi",
        ),
    ),
]
Quantities = Annotated[dict[str, Quantity], Meta(max_length=32)]


class Record(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the spec. mypy wants `frozen` said again by each, msgspec does not. Unknown fields
    are passed over: the definition may be newer than the operator, and typos are refused by it.
    `whole`: of several appliers one has all of its fields, as half of each would be neither's."""

    rules: ClassVar[tuple[CelRule, ...]] = ()
    whole: ClassVar[bool] = False


class SecretRef(Record, frozen=True, kw_only=True):
    """A Secret in the pool's namespace. The operator reads some by this name."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="the Secret's name")]

    def __post_init__(self) -> None:
        check_name("name", self.name)


class SecretFile(Record, frozen=True, kw_only=True):
    """One key of a Secret in the pool's namespace, read as a file."""

    whole: ClassVar[bool] = True

    name: Annotated[Name, Meta(description="the Secret's name")]
    key: Annotated[SecretKey, Meta(description="which of its keys")]


class Resources(Record, frozen=True, kw_only=True):
    """Kubernetes' own: quantities by resource name. A resource that is named in neither list has
    its default, where there is one."""

    rules: ClassVar[tuple[CelRule, ...]] = (
        CelRule(
            "!has(self.requests) || !has(self.limits) || self.requests.all(name,"
            " !(name in self.limits)"
            " || !isQuantity(string(self.requests[name]))"
            " || !isQuantity(string(self.limits[name]))"
            " || quantity(string(self.requests[name]))"
            ".compareTo(quantity(string(self.limits[name]))) <= 0)",
            "more is requested than limits allows; write a request that is at most the limit of"
            " the same name",
            field=".requests",
        ),
    )

    requests: Annotated[Quantities, Meta(description="what a pod is promised")] = field(
        default_factory=dict
    )
    limits: Annotated[Quantities, Meta(description="what a pod may use at most")] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        for kind, quantities in (("requests", self.requests), ("limits", self.limits)):
            for name, quantity in quantities.items():
                check_quantity(f"{kind}.{name}", quantity)


def is_gpu(resource: str) -> bool:
    """nvidia.com/gpu, or a slice's or a shared one's name there, or amd.com/gpu. A slice or a share
    counts as whatever its name offers."""
    return resource.startswith("nvidia.com/") or resource.endswith("/gpu")


def gpus_of(limits: Mapping[str, int | str]) -> int:
    """Of one node with these limits."""
    return sum(quantity_bytes(amount) for name, amount in limits.items() if is_gpu(name))


def gpus_of_pod(spec: Mapping[str, Any]) -> int:
    """Of a pod's or a template's containers, the podTemplate's own among them."""
    containers = spec.get("containers") or ()
    limits = [(one.get("resources") or {}).get("limits") or {} for one in containers]
    return sum(gpus_of(each) for each in limits)
