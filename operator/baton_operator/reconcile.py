"""One look at one pool: make its children what they should be, and say how it is.

In: a pool's key; everything else is read from the cache and the API. Out: requests to the API, and
when to look again. Level-triggered: what happened before does not matter, so that an operator
killed at any step is followed by one that finishes. Nothing in memory is truth: what was applied
before only saves requests, and credentials are read again when their Secret is another one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import msgspec

from baton_operator.api import FIELD_MANAGER, Api, Refused
from baton_operator.builders import Manifest, build_pool, credentials_of, new_credentials
from baton_operator.cache import Body, Cache, PoolKey, read_child
from baton_operator.index import Answer
from baton_operator.index_asker import IndexAsker
from baton_operator.kinds import SECRET, kind_of
from baton_operator.metrics import Metrics
from baton_operator.observed import ChildKey, Observed, Refusal
from baton_operator.plan import Act, Applied, Apply, Delete, Foreign, plan
from baton_operator.pool import Credentials, Installation, Pool, read_pool
from baton_operator.report import Reporter
from baton_operator.spec.read import SpecError

logger = logging.getLogger(__name__)

_FOREIGN = "an object of this name is there and not the pool's; delete it, or rename the pool"
# While it is not ready, what is to be said may change by time alone, or in the index.
UNREADY_AGAIN_S = 30.0


class Incomplete(Exception):
    """Some children were refused; the pool is to be tried again."""


class _Memory(msgspec.Struct, kw_only=True):
    """What is kept of one pool between two looks. `secret`: uid and version of what was read."""

    uid: str
    applied: dict[ChildKey, Applied] = {}
    secret: tuple[str, int] = ("", 0)
    credentials: Credentials | None = None


class Reconciler:
    """One event loop's; never asked about one pool twice at the same time."""

    def __init__(
        self,
        api: Api,
        cache: Cache,
        index: IndexAsker,
        reporter: Reporter,
        installation: Installation,
        metrics: Metrics,
    ) -> None:
        self._api = api
        self._cache = cache
        self._index = index
        self._reporter = reporter
        self._installation = installation
        self._metrics = metrics
        self._memories: dict[PoolKey, _Memory] = {}

    async def reconcile(self, key: PoolKey) -> float | None:
        """Return in how many seconds to look again, None where a change will say so. Raise
        Incomplete or ApiError where it is to be tried again."""
        resource = self._cache.pool(key)
        if resource is None or "deletionTimestamp" in resource["metadata"]:
            # Its owner references delete the children.
            self._memories.pop(key, None)
            self._index.forget(key)
            return None
        memory = self._memory(key, resource["metadata"]["uid"])
        try:
            credentials = await self._credentials(key, memory)
            pool = read_pool(resource, self._installation, credentials)
            desired = build_pool(pool)
        except SpecError as error:
            # What was made from an earlier, valid spec goes on as it is.
            generation = resource["metadata"].get("generation", 0)
            await self._reporter.report(key, generation, error, self._observed(key, (), None))
            return None
        refusals = () if pool.spec.paused else await self._converge(key, pool, desired, memory)
        observed = self._observed(key, refusals, self._index.take_answer(key))
        status = await self._reporter.report(key, pool.generation, pool, observed)
        self._index.follow(key, pool, observed, status)
        if refusals:
            raise Incomplete(f"{len(refusals)} children refused; {_tell(refusals[0])}")
        ready = status.condition("Ready")
        return None if ready is not None and ready.status == "True" else UNREADY_AGAIN_S

    def _memory(self, key: PoolKey, uid: str) -> _Memory:
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            memory = self._memories[key] = _Memory(uid=uid)
        return memory

    async def _credentials(self, key: PoolKey, memory: _Memory) -> Credentials:
        """Those in the pool's Secret; new ones where it is missing or damaged, which the Secret's
        manifest then brings into the cluster before anything that uses them."""
        place = ChildKey(SECRET.api_version, SECRET.kind, key.namespace, f"{key.name}-auth")
        child = self._cache.children(key).get(place)
        if child is not None and memory.credentials and memory.secret == (child.uid, child.version):
            return memory.credentials
        body = await self._api.get(place)
        found, version = credentials_of(body), _version_of(body)
        if found is None and memory.credentials is not None and memory.secret == version:
            return memory.credentials  # new ones that are not yet in the cluster
        memory.credentials, memory.secret = found or new_credentials(os.urandom), version
        return memory.credentials

    async def _converge(
        self, key: PoolKey, pool: Pool, desired: Sequence[Manifest], memory: _Memory
    ) -> tuple[Refusal, ...]:
        """Apply and delete what differs; returns what the API server would not take."""
        known = self._cache.children(key)
        memory.applied = {
            child: memory.applied[child] for child in known if child in memory.applied
        }
        refusals = []
        for act in plan(pool.uid, desired, known, memory.applied):
            try:
                await self._act(key, pool, memory, act)
            except Refused as error:
                refusals.append(Refusal(child=act.key, code=error.code, message=error.message))
                if act.key.kind == SECRET.kind:
                    break  # nothing may be made of credentials that nobody could find again
        for refusal in refusals:
            logger.warning("pool %s: refused: %s", key, _tell(refusal))
        return tuple(refusals)

    async def _act(self, key: PoolKey, pool: Pool, memory: _Memory, act: Act) -> None:
        kind = kind_of(act.key).kind
        match act:
            case Foreign():
                raise Refused(409, _FOREIGN)
            case Delete():
                await self._api.delete(act.key, act.uid)
                self._metrics.wrote("delete", kind)
                logger.info("pool %s: deleted %s %s", key, kind, act.key.name)
            case Apply():
                if not act.seen:
                    await self._check_owner(act.key, pool.uid)
                child = self._cache.see_child(await self._api.apply(act.manifest), ours=True)
                memory.applied[act.key] = Applied(act.digest, child.uid, child.digest)
                if kind == SECRET.kind:
                    memory.secret = (child.uid, child.version)
                self._metrics.wrote("apply", kind)
                logger.info("pool %s: applied %s %s", key, kind, act.key.name)

    async def _check_owner(self, key: ChildKey, uid: str) -> None:
        """Raise Refused rather than take over what somebody else made."""
        body = await self._api.get(key)
        if body is None:
            return
        child = read_child(body)
        if child.owner != uid and (child.owner or not _ours(body)):
            raise Refused(409, _FOREIGN)

    def _observed(
        self, key: PoolKey, refusals: tuple[Refusal, ...], answer: Answer | None
    ) -> Observed:
        children = [child for _, child in sorted(self._cache.children(key).items())]
        return Observed(
            workloads=tuple(child.workload for child in children if child.workload is not None),
            pods=tuple(child.pod for child in children if child.pod is not None),
            refusals=refusals,
            nodes=answer.nodes if answer is not None else None,
            fetches=answer.fetches if answer is not None else None,
            routes=tuple(child.route for child in children if child.route is not None),
            address=next((child.address for child in children if child.address), ""),
        )


def _ours(body: Body) -> bool:
    """Made by an operator, though its owner reference is gone."""
    managers = body["metadata"].get("managedFields", ())
    return any(one.get("manager") == FIELD_MANAGER for one in managers)


def _version_of(body: Body | None) -> tuple[str, int]:
    if body is None:
        return "", 0
    return body["metadata"]["uid"], int(body["metadata"]["resourceVersion"])


def _tell(refusal: Refusal) -> str:
    return f"{refusal.child.kind} {refusal.child.name}: {refusal.code} {refusal.message}"
