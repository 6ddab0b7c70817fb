"""The kinds of values in a spec that are more than a text or a number.

In: nothing. Out: annotated types for `record` and the specs. Bounds are wide: they are there
because the API server wants to know beforehand what checking a rule may cost.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

from baton_operator.api.cel_rules import CelRule, matches, quoted, ruled
from baton_operator.api.reserved_flags import NODE_FLAGS, ROUTER_FLAGS

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
