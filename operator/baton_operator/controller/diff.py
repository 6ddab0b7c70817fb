"""The actions that bring a pool's children from their known to their desired state. Pure.

In: the manifests of the current revision, the children as last observed, and earlier applies.
Out: actions. A child that is unchanged since its last apply of the same manifest needs none. A
child that this pool owns and that has no manifest is deleted, except those that must stay. Nodes of
older revisions have no manifest; the drainer lowers their replicas. Objects of other owners are
neither changed nor deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from baton_operator.builders.child import Manifest
from baton_operator.kube.kinds import ChildKey, key_of, kind_of
from baton_operator.names import REVISION_LABEL, STORE
from baton_operator.rollout.goal import Lower
from baton_operator.state.child import CachedChild, has_served, pods_of
from baton_operator.state.observed import ObservedPod


class Applied(msgspec.Struct, frozen=True):
    """A successful apply: the manifest's digest, and the resulting object's uid and digest."""

    manifest: str
    uid: str
    digest: str


class Apply(msgspec.Struct, frozen=True, kw_only=True):
    """`seen`: the object is known to exist and to be ours. Otherwise its owner is checked first."""

    key: ChildKey
    manifest: Manifest
    digest: str
    seen: bool


class Delete(msgspec.Struct, frozen=True, kw_only=True):
    key: ChildKey
    uid: str


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """Another pool, named `owner`, controls the object with this name."""

    key: ChildKey
    owner: str


Action = Apply | Lower | Delete | Foreign


def diff_children(
    uid: str,
    desired: Sequence[Manifest],
    children: Mapping[ChildKey, CachedChild],
    applied: Mapping[ChildKey, Applied],
    lowers: Sequence[Lower] = (),
) -> list[Action]:
    """`uid` is the pool's. Applies come in the order of `desired`, then `lowers`, then
    deletions."""
    actions: list[Action] = []
    wanted = set()
    for manifest in desired:
        key = key_of(manifest)
        wanted.add(key)
        child, digest = children.get(key), manifest_digest(manifest)
        if child is not None and child.owner not in ("", uid):
            actions.append(Foreign(key=key, owner=child.owner_name))
        elif child is None or applied.get(key) != Applied(digest, child.uid, child.digest):
            ours = child is not None and child.owner == uid
            actions.append(Apply(key=key, manifest=manifest, digest=digest, seen=ours))
    kept = wanted | find_spared(desired, children)
    deletions = [
        Delete(key=key, uid=child.uid)
        for key, child in sorted(children.items())
        if child.owner == uid and key not in kept and kind_of(key).made
    ]
    return [*actions, *lowers, *deletions]


def find_spared(
    desired: Sequence[Manifest], children: Mapping[ChildKey, CachedChild]
) -> set[ChildKey]:
    """Children without a manifest that must stay: Deployments of older revisions until their last
    pod is gone, and the store that those nodes use. Older revisions that never served are not
    spared: they would only hold resources that the current one needs."""
    current = {key_of(manifest) for manifest in desired if _revision(manifest)}
    serving = {
        key
        for key, child in children.items()
        if child.revision
        and key not in current
        and _is_left(child, pods_of(children, child.component, child.revision))
    }
    store = {key for key, child in children.items() if child.component in STORE}
    return serving | store if serving else set()


def _is_left(child: CachedChild, pods: Sequence[ObservedPod]) -> bool:
    wanted = child.workload.desired if child.workload is not None else 0
    return has_served(child, pods) and bool(wanted or pods)


def _revision(manifest: Manifest) -> str:
    revision: str = manifest["metadata"]["labels"].get(REVISION_LABEL, "")
    return revision


def manifest_digest(manifest: Manifest) -> str:
    encoded = msgspec.json.encode(manifest, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=12).hexdigest()
