"""Applies and deletes a pool's children.

In: the manifests that the pool should have. Out: requests to the API for what differs, and the API
server's refusals. The record of earlier applies is never the truth: it only saves requests. An
object of another owner is never taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from baton_operator.builders.child import Manifest
from baton_operator.controller.diff import (
    Action,
    Applied,
    Apply,
    Delete,
    Foreign,
    diff_children,
)
from baton_operator.controller.pool_secret import PoolSecret
from baton_operator.kube.client import (
    FIELD_MANAGER,
    Api,
    ApiError,
    Conflict,
    Refused,
    ServerFailed,
)
from baton_operator.kube.kinds import NETWORK_POLICY, POOL, SECRET, ChildKey, kind_of
from baton_operator.kube.objects import Body
from baton_operator.metrics import Metrics
from baton_operator.rollout.goal import Lower
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.child import CachedChild, read_child
from baton_operator.state.observed import Refusal
from baton_operator.status.findings.applied import refusal_words

logger = logging.getLogger(__name__)
_FOREIGN = (
    "an object with this name exists and does not belong to the pool; delete it, or rename the pool"
)
# If one of these is refused, no pod may be created: its credentials could be lost, or it would be
# open to more clients than the policies allow.
_FIRST = (SECRET.kind, NETWORK_POLICY.kind)


class NotOurs(Refused):
    """An object that the pool needs belongs to somebody else."""


class Applier:
    """For the pool with this `uid`."""

    def __init__(
        self, key: PoolKey, uid: str, api: Api, cache: Cache, secret: PoolSecret, metrics: Metrics
    ) -> None:
        self._key = key
        self._uid = uid
        self._api = api
        self._cache = cache
        self._secret = secret
        self._metrics = metrics
        self._applied: dict[ChildKey, Applied] = {}

    async def apply_children(
        self, desired: Sequence[Manifest], lowers: Sequence[Lower]
    ) -> tuple[Refusal, ...]:
        """Apply and delete what differs. Return the API server's refusals."""
        children = self._cache.children(self._key)
        if self._secret.child is not None:
            children[self._secret.child.key] = self._secret.child
        self._applied = {key: self._applied[key] for key in children if key in self._applied}
        actions = diff_children(self._uid, desired, children, self._applied, lowers)
        if any(isinstance(action, Apply) and not action.seen for action in actions):
            await self._check_pool()
        refusals = []
        for action in actions:
            try:
                await self._act(action)
            except (Refused, ServerFailed) as error:
                own_words = isinstance(error, NotOurs)
                refusals.append(
                    Refusal(
                        child=action.key,
                        code=error.code,
                        message=error.message,
                        own_words=own_words,
                    )
                )
                if action.key.kind in _FIRST and not isinstance(action, Delete):
                    break
        for refusal in refusals:
            logger.warning("pool %s: refused: %s", self._key, refusal_words(refusal))
        return tuple(refusals)

    async def _act(self, action: Action) -> None:
        pool, child, kind = self._key, action.key, kind_of(action.key).kind
        match action:
            case Foreign():
                raise _foreign(action.owner, pool)
            case Lower():
                body = await self._api.set_replicas(
                    child, action.uid, action.version, action.replicas
                )
                self._cache.see_child(body, ours=True)
                self._metrics.count_write("patch", kind)
                logger.info("pool %s: %s has %d replicas", pool, child.name, action.replicas)
            case Delete():
                await self._api.delete(child, action.uid)
                self._metrics.count_write("delete", kind)
                logger.info("pool %s: deleted %s %s", pool, kind, child.name)
            case Apply():
                if not action.seen or kind == SECRET.kind:  # a Secret is not watched
                    await self._check_owner(child)
                result = self._see_applied(await self._api.apply(action.manifest))
                self._applied[child] = Applied(action.digest, result.uid, result.digest)
                self._metrics.count_write("apply", kind)
                logger.info("pool %s: applied %s %s", pool, kind, child.name)

    def _see_applied(self, answer: Body) -> CachedChild:
        """Record the answer itself: the cache may already hold a later edit by someone else."""
        if answer["kind"] != SECRET.kind:
            return self._cache.see_child(answer, ours=True)
        return self._secret.see_applied(answer)

    async def _check_pool(self) -> None:
        """Raise Conflict rather than create children of a pool that is gone. A pool without status
        is new and needs no check."""
        key = self._key
        if not (self._cache.pool(key) or {}).get("status"):
            return
        body = await self._api.get(ChildKey(POOL.api_version, POOL.kind, key.namespace, key.name))
        metadata = body["metadata"] if body is not None else {}
        if metadata.get("uid") == self._uid and "deletionTimestamp" not in metadata:
            return
        self._cache.lose_pool(key, self._uid)
        if body is not None:
            self._cache.see_pool(body)
        raise Conflict(f"pool {key} is gone or was replaced")

    async def _check_owner(self, key: ChildKey) -> None:
        """Raise Refused rather than take over an object of another owner."""
        body = await self._api.get(key)
        if body is None:
            return
        child = read_child(body)
        if child.owner != self._uid and (child.owner or not _ours(body)):
            raise _foreign(child.owner_name, self._key)


def _ours(body: Body) -> bool:
    """Whether an operator applied the object, although its owner reference is gone."""
    managers = body["metadata"].get("managedFields", ())
    return any(manager.get("manager") == FIELD_MANAGER for manager in managers)


def _foreign(owner: str, key: PoolKey) -> ApiError:
    """Conflict for a child of an earlier pool with this name: garbage collection deletes it."""
    if owner == key.name:
        return Conflict("an object of an earlier pool with this name still exists")
    return NotOurs(409, _FOREIGN)
