"""One InferencePool as the builders see it: whose it is, what it wants, which images serve it.

In: the resource as the API gives it, the images that the operator was installed with.
Out: a `Pool`, or SpecError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from baton_operator.spec import PoolSpec, SpecError, read_spec

API_VERSION = "baton.dev/v1alpha1"
KIND = "InferencePool"
# With "-kv-data" a StatefulSet's name, and with its revision's hash a label, hence 63 characters.
LONGEST_NAME = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)


class Images(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Full names with versions. `redis` is redis-server or Valkey's, version 7 or later."""

    node: str
    router: str
    redis: str


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    namespace: str
    uid: str
    spec: PoolSpec
    images: Images

    @property
    def key(self) -> str:
        """The pool's name in Redis, which pools of other namespaces may share."""
        return f"{self.namespace}.{self.name}"


def read_pool(resource: Mapping[str, Any], images: Images) -> Pool:
    """Raise SpecError naming the field that cannot be obeyed."""
    metadata = resource["metadata"]
    name = metadata["name"]
    if _NAME.fullmatch(name) is None or len(name) > LONGEST_NAME:
        raise SpecError(
            f"metadata.name: {name!r} cannot begin the names of services; write at most"
            f" {LONGEST_NAME} of a-z, 0-9 and '-', a letter first"
        )
    return Pool(
        name=name,
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=read_spec(resource.get("spec", {})),
        images=images,
    )
