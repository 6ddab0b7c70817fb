"""One drain step of a pool: marks the nodes that must go, drains them, and lets them go.

In: the pool's current revision, what was observed. Out: the replicas that the Deployments of the
current and of older revisions may have now, decided before any manifest is built; what delays the
drain. `rollout` decides how many nodes of each revision there should be. Level-triggered: the pods'
annotations (`marks`) say which nodes go, the index says how far they are, and each step repeats the
requests to the routers. So a new operator continues wherever an old one was killed. A pod is marked
before its drain starts, and unmarked after its node is used again: every draining node has a mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.builders.child import Manifest, NodeRevision
from baton_operator.drain.marks import LeaveTerms, leave_of, mark_body, unmark_body
from baton_operator.drain.routers import Routers
from baton_operator.drain.steps import DrainWait, allowed_replicas, choose_leavers, wait_of
from baton_operator.drain.victims import Victim, choose_victims, is_served
from baton_operator.drain.view import (
    DeploymentNodes,
    DrainView,
    current_nodes,
    leave_for,
    old_nodes,
    view_of,
)
from baton_operator.kube.client import Api, Refused, ServerFailed
from baton_operator.rollout.goal import Lower, goal_of
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.child import CachedChild
from baton_operator.state.observed import Departure, Observed, ObservedPod, Roll
from baton_operator.status.events import PoolEvent, drain_event, drained_event, resumed_event
from baton_protocol.store import Role

Tell = Callable[[str, PoolEvent], Awaitable[None]]


class DrainStep(msgspec.Struct, frozen=True):
    """`replicas`: allowed now for the current revision. `lowers`: Deployments of older revisions.
    `ends`: events to post once everything is applied."""

    replicas: Mapping[Role, int]
    lowers: tuple[Lower, ...] = ()
    departures: tuple[Departure, ...] = ()
    ends: tuple[PoolEvent, ...] = ()
    roll: Roll = Roll()


class _Done(msgspec.Struct, frozen=True):
    """The result for one Deployment."""

    replicas: int
    departures: tuple[Departure, ...] = ()
    ends: tuple[PoolEvent, ...] = ()


class Drainer:
    """For one event loop. `tell` posts an event, `now` is the time of day."""

    def __init__(
        self, api: Api, cache: Cache, routers: Routers, tell: Tell, now: Callable[[], datetime]
    ) -> None:
        self._api = api
        self._cache = cache
        self._routers = routers
        self._post_event = tell
        self._now = now

    async def take_step(
        self,
        key: PoolKey,
        pool: Pool,
        revision: NodeRevision,
        observed: Observed,
    ) -> DrainStep:
        """`revision` is the current one. Raise Conflict if a pod was replaced meanwhile,
        ApiUnavailable if the API server does not answer."""
        children, now_s = self._cache.children(key), self._cache.now_s()
        view = view_of(key, pool, revision.name, children, observed, self._now(), now_s)
        goal = goal_of(pool, revision, children, now_s)
        done: list[_Done] = []
        replicas = dict(goal.replicas)
        for role in replicas:
            if (nodes := current_nodes(view, role, replicas[role])) is not None:
                done.append(await self._deployment(view, nodes))
                replicas[role] = done[-1].replicas
        lowers: list[Lower] = []
        for old in goal.old:
            if (nodes := old_nodes(view, old)) is not None:
                done.append(await self._deployment(view, nodes))
                if done[-1].replicas < nodes.current:
                    lowers.append(_lower(old.child, done[-1].replicas))
        return DrainStep(
            replicas,
            tuple(lowers),
            tuple(item for result in done for item in result.departures),
            tuple(item for result in done for item in result.ends),
            goal.roll,
        )

    async def _deployment(self, view: DrainView, nodes: DeploymentNodes) -> _Done:
        surplus = len(nodes.pods) - nodes.wanted
        lowers = nodes.current > nodes.wanted
        replaced = bool(nodes.replaced_by)
        # Whether a new node can take over requests is unknown until all new nodes have reported.
        patient = replaced and not view.unreachable
        reports = None if patient and view.unreported else view.reports
        victims = [
            victim
            for victim in choose_victims(
                nodes.pods, reports, surplus, patient=patient, replaced=replaced
            )
            # Once the replicas are lowered Kubernetes chooses, and takes marked pods first.
            if lowers or victim.pod.drain_since
        ]
        going = {victim.pod.name for victim in victims}
        back = [pod for pod in nodes.pods if pod.drain_since and pod.name not in going]
        held = await self._resume(view, nodes, back)
        if not lowers:
            return _Done(max(nodes.current, nodes.wanted), held)
        waits = await self._drain(view, nodes, victims)
        held += tuple(
            Departure(nodes.role, f"{name}: {wait.message}", held=True)
            for name, wait in waits.items()
            if wait.message
        )
        if surplus > len(victims):
            held += (_unchosen(view, nodes, surplus - len(victims)),)
        leaving = choose_leavers(victims, waits.keys())
        replicas = allowed_replicas(nodes.current, nodes.wanted, len(nodes.pods), len(leaving))
        return _Done(replicas, held, _ends(nodes, replicas, leaving))

    async def _resume(
        self, view: DrainView, nodes: DeploymentNodes, pods: Sequence[ObservedPod]
    ) -> tuple[Departure, ...]:
        """These nodes stay after all. A node that no router knows joins like any new node."""
        token = view.pool.credentials.link_token
        answers = await asyncio.gather(
            *(self._routers.resume_node(view.routers, token, pod.name) for pod in pods)
        )
        held = []
        for pod, answer in zip(pods, answers, strict=True):
            failed = answer.outcome in ("failed", "unable")
            problem = answer.message if failed else await self._unmark(view, pod)
            if problem:
                message = f"{pod.name} is needed again, but cannot resume: {problem}"
                held.append(Departure(nodes.role, message, held=True))
            else:
                await self._post_event(view.pool.uid, resumed_event(nodes.role, pod.name))
        return tuple(held)

    async def _drain(
        self, view: DrainView, nodes: DeploymentNodes, victims: Sequence[Victim]
    ) -> dict[str, DrainWait]:
        """Nodes that must wait, by name. The requests to routers run concurrently, so that one
        without an answer delays no other."""
        going = {victim.pod.name for victim in victims}
        served = [victim for victim in victims if is_served(victim.pod)]
        fresh = {
            victim.pod.name: leave_for(view, nodes, victim.pod, going)
            for victim in served
            if not nodes.is_marked(victim.pod)
        }
        refused = {
            victim.pod.name: wait
            for victim in served
            if victim.pod.name in fresh
            and (wait := await self._mark(view, nodes, victim, fresh[victim.pod.name])) is not None
        }
        marked = [victim.pod for victim in served if victim.pod.name not in refused]
        leaves = [fresh.get(pod.name) or leave_of(pod) for pod in marked]
        token = view.pool.credentials.link_token
        answers = await asyncio.gather(
            *(
                self._routers.drain_node(view.routers, token, pod.name, leave)
                for pod, leave in zip(marked, leaves, strict=True)
            )
        )
        waits = {}
        for pod, leave, answer in zip(marked, leaves, answers, strict=True):
            drained_s = 0.0 if pod.name in fresh else view.now_s - pod.seen.drain
            waits[pod.name] = wait_of(pod, answer, view.reports, drained_s, leave.seconds)
        return refused | {name: wait for name, wait in waits.items() if wait is not None}

    async def _mark(
        self, view: DrainView, nodes: DeploymentNodes, victim: Victim, leave: LeaveTerms
    ) -> DrainWait | None:
        child = _pod_child(view, victim.pod)
        problem = await self._annotate(mark_body(child.key, child.uid, view.now, victim.why, leave))
        if problem:
            return DrainWait(problem)
        event = drain_event(nodes.role, victim.pod.name, victim.why, leave.replaced_by)
        await self._post_event(view.pool.uid, event)
        return None

    async def _unmark(self, view: DrainView, pod: ObservedPod) -> str:
        child = _pod_child(view, pod)
        return await self._annotate(unmark_body(child.key, child.uid))

    async def _annotate(self, body: Manifest) -> str:
        """Apply the annotations. Return why the API server refused them, "" on success."""
        try:
            self._cache.see_child(await self._api.apply(body), ours=True)
        except (Refused, ServerFailed) as error:
            return f"the API server refused its drain annotations: {error}"
        return ""


def _lower(child: CachedChild, replicas: int) -> Lower:
    return Lower(key=child.key, uid=child.uid, version=child.version, replicas=replicas)


def _pod_child(view: DrainView, pod: ObservedPod) -> CachedChild:
    return next(child for child in view.children.values() if child.pod == pod)


def _unchosen(view: DrainView, nodes: DeploymentNodes, count: int) -> Departure:
    reason = view.unreachable or "the operator is querying the index"
    if nodes.replaced_by and view.reports is not None and view.unreported:
        reason = f"the index has no report yet of {', '.join(view.unreported)}"
    return Departure(nodes.role, f"{count} more to remove: {reason}", held=bool(view.unreachable))


def _ends(
    nodes: DeploymentNodes, replicas: int, leaving: Sequence[Victim]
) -> tuple[PoolEvent, ...]:
    names = [victim.pod.name for victim in leaving if is_served(victim.pod)]
    if replicas == nodes.current or not names:
        return ()
    return (drained_event(nodes.title, nodes.current, replicas, names),)
