"""An InferencePool as the other folders use it: metadata, spec, installation and credentials.

In: the resource as the API returns it, the operator's installation, the pool's credentials.
Out: a `Pool`, or a `SpecError` that says what to write instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from baton_operator.api.pod_templates import check_pod_templates
from baton_operator.api.spec import PoolSpec
from baton_operator.api.spec_reader import SpecError, read_spec
from baton_operator.names import LONGEST_POOL_NAME, POOL_NAME


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
    check_pod_templates(spec)
    return Pool(
        name=name,
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 0),
        spec=spec,
        installation=installation,
        credentials=credentials,
    )
