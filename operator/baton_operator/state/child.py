"""A pool's child as the cache keeps it, and how it is read from an object. Pure.

In: an object as the API returns it. Out: the little that planning and status need of it: its owner,
a digest of its desired state, and what status reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from baton_operator.kube.kinds import POOL, ChildKey, key_of
from baton_operator.kube.objects import Body, version_of
from baton_operator.names import COMPONENT_LABEL, REVISION_LABEL, SCALER_KIND
from baton_operator.state.observed import (
    ObservedPod,
    ObservedRoute,
    ObservedScaler,
    ObservedWorkload,
)
from baton_operator.state.readers import (
    read_address,
    read_pod,
    read_route,
    read_scaler,
    read_workload,
)

# Every write to an object changes these fields.
_VOLATILE = frozenset({"resourceVersion", "managedFields", "generation"})
_REPORTS = frozenset({"deployment.kubernetes.io/revision"})


class CachedChild(msgspec.Struct, frozen=True, kw_only=True):
    """`owner` is the uid of the pool that controls it and `owner_name` its name, "" without one.
    `proven`: a Deployment whose pods have all been available at some time, perhaps not now."""

    key: ChildKey
    uid: str
    version: int
    owner: str
    owner_name: str = ""
    component: str
    revision: str
    digest: str
    proven: bool = False
    workload: ObservedWorkload | None = None
    pod: ObservedPod | None = None
    route: ObservedRoute | None = None
    scaler: ObservedScaler | None = None
    address: str = ""

    def differs(self, other: CachedChild | None) -> bool:
        """Whether anything but the version differs."""
        return other is None or msgspec.structs.replace(self, version=other.version) != other


def read_child(body: Body) -> CachedChild:
    metadata = body["metadata"]
    labels = metadata.get("labels", {})
    owner = _owner(metadata)
    kind = body["kind"]
    return CachedChild(
        key=key_of(body),
        uid=metadata["uid"],
        version=version_of(body),
        owner=owner["uid"],
        owner_name=owner["name"],
        component=labels.get(COMPONENT_LABEL, ""),
        revision=labels.get(REVISION_LABEL, ""),
        digest="" if kind == "Pod" else digest_of(body),
        proven=_proven(body),
        workload=read_workload(body) if kind == "Deployment" else None,
        pod=read_pod(body) if kind == "Pod" else None,
        route=read_route(body) if kind in ("Ingress", "HTTPRoute") else None,
        scaler=read_scaler(body) if kind == SCALER_KIND else None,
        address=read_address(body) if kind == "Service" else "",
    )


def pods_of(
    children: Mapping[ChildKey, CachedChild], component: str, revision: str
) -> tuple[ObservedPod, ...]:
    """A Deployment's pods, except those that have ended."""
    pods = (child.pod for child in children.values())
    return tuple(
        pod
        for pod in pods
        if pod is not None
        and (pod.component, pod.revision) == (component, revision)
        and pod.stage != "over"
    )


def _owner(metadata: Body) -> Body:
    """The owner reference to a pool of our API group, or an empty one."""
    for reference in metadata.get("ownerReferences", ()):
        if (
            reference["kind"] == POOL.kind
            and reference["apiVersion"].partition("/")[0] == POOL.group
        ):
            return dict(reference)
    return {"uid": "", "name": ""}


def _proven(body: Body) -> bool:
    conditions = body.get("status", {}).get("conditions") or ()
    return any(condition.get("reason") == "NewReplicaSetAvailable" for condition in conditions)


def digest_of(body: Body) -> str:
    """A digest of the object's desired state, without what controllers report in it."""
    metadata = {name: body["metadata"][name] for name in body["metadata"].keys() - _VOLATILE}
    notes = metadata.get("annotations", {}).items()
    metadata["annotations"] = {name: note for name, note in notes if name not in _REPORTS}
    desired = {name: body[name] for name in body.keys() - {"status"}} | {"metadata": metadata}
    encoded = msgspec.json.encode(desired, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()


def has_served(child: CachedChild, pods: Iterable[ObservedPod]) -> bool:
    """Whether any node of the Deployment was ever ready."""
    ready = child.workload.ready if child.workload is not None else 0
    return child.proven or ready > 0 or any(pod.ready for pod in pods)
