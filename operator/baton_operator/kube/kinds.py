"""The kinds of objects that the operator uses, and their API paths.

In: nothing. Out: one table, from which watches, resyncs, applies and permissions follow.
"""

from __future__ import annotations

from typing import Any

import msgspec

from baton_operator.names import API_VERSION, POOL_KIND, SCALER_KIND


class ObjectKind(msgspec.Struct, frozen=True, kw_only=True):
    """A namespaced kind. `made`: the operator creates such objects; it only reads others.
    `watched`: the operator lists and watches them; it reads others by name. `optional`: a cluster
    may lack the kind."""

    api_version: str
    kind: str
    plural: str
    made: bool = True
    watched: bool = True
    optional: bool = False

    @property
    def group(self) -> str:
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None, name: str = "") -> str:
        """The path of one object, or of all objects, in one namespace or (None) in all."""
        root = f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"
        where = f"/namespaces/{namespace}" if namespace is not None else ""
        return f"{root}{where}/{self.plural}" + (f"/{name}" if name else "")


POOL = ObjectKind(api_version=API_VERSION, kind=POOL_KIND, plural="inferencepools", made=False)
POOL_SCALER = ObjectKind(
    api_version=API_VERSION, kind=SCALER_KIND, plural="poolscalers", optional=True
)
# The right to list or watch Secrets includes reading all of them: RBAC cannot restrict it to labels
# or to metadata.
SECRET = ObjectKind(api_version="v1", kind="Secret", plural="secrets", watched=False)
POD = ObjectKind(api_version="v1", kind="Pod", plural="pods", made=False)
NETWORK_POLICY = ObjectKind(
    api_version="networking.k8s.io/v1", kind="NetworkPolicy", plural="networkpolicies"
)
HTTP_ROUTE = ObjectKind(
    api_version="gateway.networking.k8s.io/v1", kind="HTTPRoute", plural="httproutes", optional=True
)
CHILDREN = (
    SECRET,
    ObjectKind(api_version="v1", kind="Service", plural="services"),
    ObjectKind(api_version="apps/v1", kind="Deployment", plural="deployments"),
    NETWORK_POLICY,
    ObjectKind(api_version="networking.k8s.io/v1", kind="Ingress", plural="ingresses"),
    HTTP_ROUTE,
    POOL_SCALER,
    ObjectKind(api_version="policy/v1", kind="PodDisruptionBudget", plural="poddisruptionbudgets"),
    POD,
)
WATCHED = tuple(kind for kind in CHILDREN if kind.watched)
EVENT = ObjectKind(api_version="events.k8s.io/v1", kind="Event", plural="events")
LEASE = ObjectKind(api_version="coordination.k8s.io/v1", kind="Lease", plural="leases")
_BY_NAME = {(kind.api_version, kind.kind): kind for kind in (*CHILDREN, POOL, EVENT, LEASE)}


def kind_of(body: Any) -> ObjectKind:
    """The kind of a manifest, a live object or a ChildKey."""
    if isinstance(body, ChildKey):
        return _BY_NAME[body.api_version, body.kind]
    return _BY_NAME[body["apiVersion"], body["kind"]]


def key_of(body: dict[str, Any]) -> ChildKey:
    metadata = body["metadata"]
    return ChildKey(body["apiVersion"], body["kind"], metadata["namespace"], metadata["name"])


class ChildKey(msgspec.Struct, frozen=True, order=True):
    """Identifies one object. `api_version` and `kind` are as in a manifest."""

    api_version: str
    kind: str
    namespace: str
    name: str
