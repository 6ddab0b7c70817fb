"""The reconcile of one pool: makes its children match the spec and reports its status.

In: the cache and the API. Out: requests to the API, and the time of the next reconcile. It is
level-triggered and does not depend on earlier events, so an operator that is killed at any step is
followed by one that finishes the work. Memory is never the truth: the record of earlier applies
only saves requests. Nothing watches the Secret of credentials, so it is read again after SECRET_S.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from baton_operator.api.pool import Credentials, Installation, Pool, read_pool
from baton_operator.api.spec_reader import SpecError
from baton_operator.api.status import PoolStatus, read_operator, read_status
from baton_operator.autoscaling.pool_scalers import Scalers
from baton_operator.builders import (
    NodeRevision,
    build_pool,
    credentials_of,
    new_credentials,
    revision_of,
)
from baton_operator.builders.child import Manifest, child_name
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.controller.ownership import Ownership, Turn
from baton_operator.controller.pool_task import Incomplete, PoolGone
from baton_operator.controller.status_writer import StatusWriter
from baton_operator.drain.drainer import Drainer, DrainStep
from baton_operator.kube.client import (
    FIELD_MANAGER,
    Api,
    ApiError,
    Conflict,
    Refused,
    ServerFailed,
    Unavailable,
)
from baton_operator.kube.kinds import NETWORK_POLICY, POOL, SECRET, ChildKey, key_of, kind_of
from baton_operator.kube.objects import Body
from baton_operator.metrics import Metrics
from baton_operator.names import REVISION_LABEL, STORE
from baton_operator.rollout.goal import Lower
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.child import CachedChild, has_served, pods_of, read_child
from baton_operator.state.hosts import shared_hosts
from baton_operator.state.index_reader import LOOK_S, Answer
from baton_operator.state.observed import Observed, ObservedPod, Planned, Refusal, Roll
from baton_operator.status.events import held_event
from baton_operator.status.findings.applied import refusal_words
from baton_operator.status.findings.sole_operator import held_words


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


Act = Apply | Lower | Delete | Foreign


def plan(
    uid: str,
    desired: Sequence[Manifest],
    known: Mapping[ChildKey, CachedChild],
    applied: Mapping[ChildKey, Applied],
    lowers: Sequence[Lower] = (),
) -> list[Act]:
    """The actions that bring a pool's children from their known to their desired state. Pure.

    In: the manifests of the current revision, the children as last observed, and earlier applies.
    Out: actions. A child that is unchanged since its last apply of the same manifest needs none. A
    child that this pool owns and that has no manifest is deleted, except those in `spared`. Nodes
    of older revisions have no manifest; the drainer sets their replicas through `lowers`. Objects
    of other owners are neither changed nor deleted.

    `uid` is the pool's. Applies come in the order of `desired`, then `lowers`, then deletions.
    """
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
    """Children without a manifest that must stay: Deployments of older revisions until their last
    pod is gone, and the store that those nodes use. Older revisions that never served are not
    spared: they would only hold resources that the current one needs."""
    current = {key_of(manifest) for manifest in desired if _revision(manifest)}
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


logger = logging.getLogger(__name__)

_FOREIGN = (
    "an object with this name exists and does not belong to the pool; delete it, or rename the pool"
)
# If one of these is refused, no pod may be created: its credentials could be lost, or it would be
# open to more clients than the policies allow.
_FIRST = (SECRET.kind, NETWORK_POLICY.kind)
# While a pool is not ready, its status can change without an event, or through the index.
UNREADY_AGAIN_S = 30.0
# While nodes drain, each reconcile repeats the drain requests and checks deadlines. If no router
# answers, a reconcile may take 4 s. In a roll-out everything except a node that ends unready causes
# an event.
DRAINING_AGAIN_S = 2.0
HELD_AGAIN_S = 10.0
# Until nodes have reported again after an outage of the API server; usually an event comes first.
SETTLING_AGAIN_S = 2.0
# Maximum age of what is known of a pool's Secret, so at most one request for it in this time. The
# resync reconciles pools that have no events.
SECRET_S = 30.0


class NotOurs(Refused):
    """An object that the pool needs belongs to somebody else."""


class PoolPlanner(Protocol):
    """Sets the planned numbers of nodes in a pool; `Autoscaler` implements it."""

    def follow(
        self, pool: Pool, revision: str, observed: Observed, answer: Answer | None
    ) -> tuple[Pool, Planned | None]: ...

    def forget(self) -> None: ...


class PoolParts(msgspec.Struct, frozen=True, kw_only=True):
    """The collaborators of a pool's reconcile."""

    index: IndexPoller
    scalers: Scalers
    planner: PoolPlanner
    drainer: Drainer
    status: StatusWriter
    metrics: Metrics
    ownership: Ownership


class Reconciler:
    """Reconciles the pool with this `uid`. Not reentrant."""

    def __init__(
        self,
        key: PoolKey,
        uid: str,
        api: Api,
        cache: Cache,
        parts: PoolParts,
        installation: Installation,
        clock: Callable[[], float],
    ) -> None:
        self._key = key
        self._uid = uid
        self._api = api
        self._cache = cache
        self._parts = parts
        self._installation = installation
        self._metrics = parts.metrics
        self._clock = clock
        self._applied: dict[ChildKey, Applied] = {}
        # The pool's Secret as last read or applied, and when; None if it does not exist.
        self._secret: CachedChild | None = None
        self._secret_at = -math.inf
        self._credentials: Credentials | None = None
        self._stays_away = False  # another operator manages the pool
        self._sharers: set[str] = set()  # pools with the same host name

    async def ask_index(self) -> None:
        await self._parts.index.run()

    def end(self) -> None:
        self._parts.planner.forget()

    async def reconcile(self) -> float | None:
        """Return the seconds until the next reconcile; None if only a change needs one. Raise
        PoolGone, or for a retry Incomplete or ApiError."""
        resource = self._cache.pool(self._key)
        if resource is None or self._cache.pool_uid(self._key) != self._uid:
            raise PoolGone
        turn = await self._take_turn(resource)
        if not turn.acts:
            return turn.again_s
        again_s = await self._manage()
        return turn.again_s if again_s is None else min(again_s, turn.again_s)

    async def _take_turn(self, resource: Body) -> Turn:
        """Find out whether this operator manages the pool, and record the answer in its status."""
        parts = self._parts
        known = read_operator(resource)
        turn = parts.ownership.turn(known, parts.status.now())
        if turn.record is not None:
            await parts.status.claim(resource, turn.record)
        if turn.acts:
            self._stays_away = False
            return turn
        assert known is not None, "a pool that nobody manages is taken"
        holder, name = known.name, parts.ownership.name
        if turn.record is not None and turn.record.other != known.other:
            await parts.status.tell(self._uid, held_event(holder, name))
        elif not self._stays_away:
            logger.warning("pool %s: %s", self._key, held_words(holder, name))
        if not self._stays_away:
            parts.index.rest()
            parts.planner.forget()
        self._stays_away = True
        return turn

    async def _manage(self) -> float | None:
        resource = self._cache.pool(self._key)
        assert resource is not None
        if self._cache.settles(self._key):
            # The pods' state is unknown: do not report, scale, drain or roll out until they settle.
            logger.info(
                "pool %s: waiting for nodes to report after the API server was away", self._key
            )
            return SETTLING_AGAIN_S
        parts = self._parts
        credentials, refusals = await self._login()
        try:
            pool = read_pool(resource, self._installation, credentials)
            if not refusals:
                pool = await parts.scalers.follow(self._key, pool)
            revision = revision_of(pool)
            answer, silent = parts.index.take_answer(), parts.index.silent
            seen = self._observed((), answer, silent=silent)
            pool, planned = parts.planner.follow(pool, revision.name, seen, answer)
        except SpecError as error:
            # Objects from an earlier, valid spec stay as they are.
            generation = resource["metadata"].get("generation", 0)
            await parts.status.report(generation, error, "", self._observed((), None))
            return None
        step = None
        if not refusals and not pool.spec.paused:
            seen = msgspec.structs.replace(seen, planned=planned)
            step, refusals = await self._change(pool, revision, seen)
        if self._cache.settles(self._key):
            return SETTLING_AGAIN_S  # the API server was away during this reconcile
        observed = self._observed(refusals, answer, silent=silent, step=step, planned=planned)
        status = await parts.status.report(pool.generation, pool, revision.name, observed)
        parts.index.follow(pool, observed, status)
        self._tell_sharers(observed)
        if refusals:
            raise _incomplete(refusals)
        again_s = _again_s(observed, status)
        return again_s if planned is None else min(again_s or LOOK_S, LOOK_S)

    def _tell_sharers(self, observed: Observed) -> None:
        """Let the pools with the same host name report it too, and report when it is over."""
        now = {shared.pool for shared in observed.shared_hosts}
        for name in now ^ self._sharers:
            self._cache.wake(PoolKey(*name.split("/")))
        self._sharers = now

    async def _change(
        self, pool: Pool, revision: NodeRevision, seen: Observed
    ) -> tuple[DrainStep, tuple[Refusal, ...]]:
        """Decide how many nodes of each revision may exist now, then apply all manifests."""
        parts = self._parts
        if seen.planned is not None and self._is_news(seen.planned):
            # Record the decision before acting on it, so that a successor of a killed operator
            # knows it.
            await parts.status.report(pool.generation, pool, revision.name, seen)
        step = await parts.drainer.step(self._key, pool, revision, seen)
        refusals = await self._converge(build_pool(pool, revision.name, step.replicas), step.lowers)
        for event in () if refusals else step.ends:
            await parts.status.tell(self._uid, event)
        return step, refusals

    def _is_news(self, planned: Planned) -> bool:
        """Whether the counts are to be applied and differ from those in the status."""
        status = read_status(self._cache.pool(self._key) or {})
        written = status.autoscaling if status is not None else None
        counts = (planned.mode, planned.prefill, planned.decode)
        last = written and (written.mode, written.desired_prefill, written.desired_decode)
        return planned.mode == "auto" and counts != last

    async def _login(self) -> tuple[Credentials, tuple[Refusal, ...]]:
        """The credentials, or the refusal to read them. With a refusal nothing is created."""
        try:
            return await self._read_credentials(), ()
        except Refused as error:
            refusal = Refusal(child=_secret(self._key), code=error.code, message=error.message)
            logger.warning("pool %s: refused: %s", self._key, refusal_words(refusal))
            return Credentials(redis_password="", link_token="", tenant_secret=""), (refusal,)

    async def _read_credentials(self) -> Credentials:
        """The credentials in the pool's Secret. If the Secret is missing, those known from before;
        if none are known, or the Secret is damaged, new ones. The Secret's manifest is applied
        before anything that uses them."""
        now, secret = self._clock(), self._secret
        # A Secret that is missing or belongs to an earlier pool will change soon.
        known = secret is not None and secret.owner == self._uid
        if self._credentials is not None and known and now - self._secret_at < SECRET_S:
            return self._credentials
        body = await self._api.get(_secret(self._key))
        self._secret, self._secret_at = None if body is None else read_child(body), now
        if self._credentials is not None and _version_of(self._secret) == _version_of(secret):
            return self._credentials  # these may be new and not yet in the cluster
        found = credentials_of(body, os.urandom, self._credentials)
        kept = self._credentials if body is None else None
        self._credentials = found or kept or new_credentials(os.urandom)
        return self._credentials

    async def _converge(
        self, desired: Sequence[Manifest], lowers: Sequence[Lower]
    ) -> tuple[Refusal, ...]:
        """Apply and delete what differs. Return the API server's refusals."""
        known = self._cache.children(self._key)
        if self._secret is not None:
            known[self._secret.key] = self._secret
        self._applied = {child: self._applied[child] for child in known if child in self._applied}
        acts = plan(self._uid, desired, known, self._applied, lowers)
        if any(isinstance(act, Apply) and not act.seen for act in acts):
            await self._check_pool()
        refusals = []
        for act in acts:
            try:
                await self._act(act)
            except (Refused, ServerFailed) as error:
                own_words = isinstance(error, NotOurs)
                refusals.append(
                    Refusal(
                        child=act.key, code=error.code, message=error.message, own_words=own_words
                    )
                )
                if act.key.kind in _FIRST and not isinstance(act, Delete):
                    break
        for refusal in refusals:
            logger.warning("pool %s: refused: %s", self._key, refusal_words(refusal))
        return tuple(refusals)

    async def _act(self, act: Act) -> None:
        key, kind = self._key, kind_of(act.key).kind
        match act:
            case Foreign():
                raise _foreign(act.owner, self._key)
            case Lower():
                body = await self._api.set_replicas(act.key, act.uid, act.version, act.replicas)
                self._cache.see_child(body, ours=True)
                self._metrics.wrote("patch", kind)
                logger.info("pool %s: %s has %d replicas", key, act.key.name, act.replicas)
            case Delete():
                await self._api.delete(act.key, act.uid)
                self._metrics.wrote("delete", kind)
                logger.info("pool %s: deleted %s %s", key, kind, act.key.name)
            case Apply():
                if not act.seen or kind == SECRET.kind:  # a Secret is not watched
                    await self._check_owner(act.key)
                child = self._see_applied(await self._api.apply(act.manifest))
                self._applied[act.key] = Applied(act.digest, child.uid, child.digest)
                self._metrics.wrote("apply", kind)
                logger.info("pool %s: applied %s %s", key, kind, act.key.name)

    def _see_applied(self, answer: Body) -> CachedChild:
        """Record the answer itself: the cache may already hold a later edit by someone else."""
        if answer["kind"] != SECRET.kind:
            return self._cache.see_child(answer, ours=True)
        self._secret, self._secret_at = read_child(answer), self._clock()
        return self._secret

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

    async def _check_owner(self, child: ChildKey) -> None:
        """Raise Refused rather than take over an object of another owner."""
        body = await self._api.get(child)
        if body is None:
            return
        found: CachedChild = read_child(body)
        if found.owner != self._uid and (found.owner or not _ours(body)):
            raise _foreign(found.owner_name, self._key)

    def _observed(
        self,
        refusals: tuple[Refusal, ...],
        answer: Answer | None,
        *,
        silent: bool = False,
        step: DrainStep | None = None,
        planned: Planned | None = None,
    ) -> Observed:
        children = [child for _, child in sorted(self._cache.children(self._key).items())]
        return Observed(
            workloads=tuple(child.workload for child in children if child.workload is not None),
            pods=tuple(child.pod for child in children if child.pod is not None),
            refusals=refusals,
            silent=silent,
            nodes=answer.nodes if answer is not None else None,
            fetches=answer.fetches if answer is not None else None,
            routes=tuple(child.route for child in children if child.route is not None),
            store_problem=self._parts.index.problem,
            shared_hosts=shared_hosts(self._key, self._cache.specs()),
            address=next((child.address for child in children if child.address), ""),
            departures=step.departures if step is not None else (),
            roll=step.roll if step is not None else Roll(),
            planned=planned,
        )


def _again_s(observed: Observed, status: PoolStatus) -> float | None:
    if observed.drains:
        return HELD_AGAIN_S if observed.held else DRAINING_AGAIN_S
    if observed.roll.rolling:
        return HELD_AGAIN_S
    ready = status.condition("Ready")
    return None if ready is not None and ready.status == "True" else UNREADY_AGAIN_S


def _ours(body: Body) -> bool:
    """Whether an operator applied the object, although its owner reference is gone."""
    managers = body["metadata"].get("managedFields", ())
    return any(manager.get("manager") == FIELD_MANAGER for manager in managers)


def _version_of(secret: CachedChild | None) -> tuple[str, int]:
    return ("", 0) if secret is None else (secret.uid, secret.version)


def _secret(key: PoolKey) -> ChildKey:
    return ChildKey(SECRET.api_version, SECRET.kind, key.namespace, child_name(key.name, "auth"))


def _foreign(owner: str, key: PoolKey) -> ApiError:
    """Conflict for a child of an earlier pool with this name: garbage collection deletes it."""
    if owner == key.name:
        return Conflict("an object of an earlier pool with this name still exists")
    return NotOurs(409, _FOREIGN)


def _incomplete(refusals: Sequence[Refusal]) -> Exception:
    message = f"{len(refusals)} objects refused; {refusal_words(refusals[0])}"
    failed = all(refusal.code >= 500 for refusal in refusals)
    return Unavailable(message) if failed else Incomplete(message)
