"""Field types that several parts of the API share, with their bounds and rules.

Bounds are wide: the API server needs them to estimate the cost of a rule.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta

from baton_operator.api.cel import text_meta
from baton_operator.api.schema_extras import open_object

LONGEST_NAME = 253
_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_NOT_A_NAME = "not a Kubernetes name; write lowercase letters, digits, '-' and '.', such as my-name"
_NOT_A_HOST = "not a host name; write one such as llm.example.com or *.example.com, without a port"
Name = Annotated[str, text_meta(_SUBDOMAIN, _NOT_A_NAME, LONGEST_NAME)]
MaybeName = Annotated[str, text_meta(_SUBDOMAIN, _NOT_A_NAME, LONGEST_NAME, optional=True)]
HostName = Annotated[str, text_meta(rf"(\*\.)?{_SUBDOMAIN}", _NOT_A_HOST, 253)]
# Most pods of one kind. The API server can estimate rules over them, a slip of the finger is
# refused, and no cluster has more.
MOST_NODES = 10_000
MOST_ROUTERS = 1_000
# A number of objects in a status.
Count = Annotated[int, Meta(ge=0, extra_json_schema={"format": "int32"})]
# Kubernetes limits the total size of an object's annotations.
Annotations = Annotated[dict[str, Annotated[str, Meta(max_length=256 * 1024)]], Meta(max_length=64)]
PodTemplate = Annotated[
    dict[str, Any], Meta(extra_json_schema=open_object("PodTemplateSpec", "metadata", "spec"))
]


def check_name(field: str, name: str) -> None:
    """Raise ValueError for an invalid object name: it could be a path to another object."""
    if re.fullmatch(_SUBDOMAIN, name, re.ASCII) is None or len(name) > LONGEST_NAME:
        raise ValueError(f"{field}: {name[:LONGEST_NAME]!r} is {_NOT_A_NAME}")
