"""What is to be done to a pool's children: pure, from what is wished for and what is known.

In: the manifests of the current revision, the children as last seen, what was applied before. Out:
acts. A child that looks as it did after its last apply, from the same manifest, costs nothing. What
has the pool's label and owner and is in no manifest goes, last of all; but see `spared`. Nodes of
older revisions have no manifest any more: who drains them says how many are left. What somebody
else owns is neither changed nor deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from baton_operator.builders.child import Manifest
from baton_operator.kube.kinds import ChildKey, key_of, kind_of
from baton_operator.names import REVISION_LABEL, STORE
from baton_operator.rollout.records import Lower
from baton_operator.state.cache import CachedChild, has_served, pods_of
from baton_operator.state.observed import ObservedPod


class Applied(msgspec.Struct, frozen=True):
    """An apply that went well: of which manifest, and what it made of which object."""

    manifest: str
    uid: str
    digest: str


class Apply(msgspec.Struct, frozen=True, kw_only=True):
    """`seen`: it is known to be there and ours; otherwise look before taking the name."""

    key: ChildKey
    manifest: Manifest
    digest: str
    seen: bool


class Delete(msgspec.Struct, frozen=True, kw_only=True):
    key: ChildKey
    uid: str


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """Its name is taken by what another pool controls, of name `owner`."""

    key: ChildKey
    owner: str


Act = Apply | Lower | Delete | Foreign


def plan(
    uid: str,
    desired: Sequence[Manifest],
    known: Mapping[ChildKey, CachedChild],
    applied: Mapping[ChildKey, Applied],
    lowers: Sequence[Lower] = (),
) -> list[Act]:
    """`uid` is the pool's. Applies come as in `desired`, then `lowers`, then deletions."""
    acts: list[Act] = []
    wanted = set()
    for manifest in desired:
        key = key_of(manifest)
        wanted.add(key)
        child, digest = known.get(key), manifest_digest(manifest)
        if child is not None and child.owner not in ("", uid):
            acts.append(Foreign(key=key, owner=child.owner_name))
        elif child is None or applied.get(key) != Applied(digest, child.uid, child.digest):
            ours = child is not None and child.owner == uid
            acts.append(Apply(key=key, manifest=manifest, digest=digest, seen=ours))
    kept = wanted | spared(desired, known)
    deletions = [
        Delete(key=key, uid=child.uid)
        for key, child in sorted(known.items())
        if child.owner == uid and key not in kept and kind_of(key).made
    ]
    return [*acts, *lowers, *deletions]


def spared(desired: Sequence[Manifest], known: Mapping[ChildKey, CachedChild]) -> set[ChildKey]:
    """Nodes of older revisions to the end of their last pod, with the store that they were told of.
    Those that never served have no use: they would only hold what the current ones need."""
    current = {key_of(one) for one in desired if _revision(one)}
    serving = {
        key
        for key, child in known.items()
        if child.revision
        and key not in current
        and _is_left(child, pods_of(known, child.component, child.revision))
    }
    store = {key for key, child in known.items() if child.component in STORE}
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
