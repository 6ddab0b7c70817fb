"""How many replicas each Deployment of a pool shall have now, from its children. Pure.

In: the pool, with as many nodes as are wanted in the end, and what its nodes are made from now; the
children as last seen. Out: a `Goal`: how many there shall be now of the current revision and of
older ones, and what a roll-out lacks. Level-triggered: an operator that knows nothing but the
cluster comes to the same goal. `now_s` is the clock of `FirstSeen`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.builders.child import NodeRevision
from baton_operator.kube.kinds import ChildKey
from baton_operator.rollout.records import OldNodes, RoleNodes, Targets
from baton_operator.rollout.targets import targets
from baton_operator.state.cache import CachedChild, has_served, pods_of
from baton_operator.state.observed import ObservedPod, Roll
from baton_protocol.store import ROLES, Role

# An old node that is not ready for so long holds nothing any more: its GPUs are worth more.
UNREADY_S = 60.0

Children = Mapping[ChildKey, CachedChild]


class OldGoal(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment of an older revision and how many replicas it shall have."""

    child: CachedChild
    role: Role
    replicas: int


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """`replicas` are those of the current revision."""

    replicas: Mapping[Role, int]
    old: tuple[OldGoal, ...] = ()
    roll: Roll = Roll()


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """One role's nodes of one revision; `pods` without those that are over."""

    role: Role
    revision: str
    deployment: CachedChild | None
    pods: tuple[ObservedPod, ...]

    @property
    def desired(self) -> int:
        workload = self.deployment.workload if self.deployment is not None else None
        return workload.desired if workload is not None else 0

    @property
    def alive(self) -> list[ObservedPod]:
        return [pod for pod in self.pods if not pod.terminating]

    @property
    def ending(self) -> int:
        return sum(pod.terminating for pod in self.pods)


def goal_of(pool: Pool, revision: NodeRevision, children: Children, now_s: float) -> Goal:
    """`revision` is the current one."""
    groups = _groups(pool, children)
    roles = [
        _role_nodes(role, pool.spec.role(role).replicas, revision, groups, now_s) for role in ROLES
    ]
    found = targets(roles, pool.spec.rollout.surge, pool.spec.gpu_budget)
    return Goal(
        replicas=found.new,
        old=tuple(
            OldGoal(child=one.deployment, role=one.role, replicas=found.old[one.role, one.revision])
            for one in groups
            if one.deployment is not None
            and (one.role, one.revision) in found.old
            # Else it is deleted.
            and has_served(one.deployment, one.pods)
        ),
        roll=_roll(pool, found, roles),
    )


def _groups(pool: Pool, children: Children) -> list[_Group]:
    deployments = {
        (child.component, child.revision): child
        for child in children.values()
        if child.workload is not None and child.owner == pool.uid
    }
    pods = [child.pod for child in children.values() if child.pod is not None]
    names = deployments.keys() | {(pod.component, pod.revision) for pod in pods}
    return [
        _Group(
            role=role,
            revision=revision,
            deployment=deployments.get((role, revision)),
            pods=pods_of(children, role, revision),
        )
        for role in ROLES
        for component, revision in sorted(names)
        if component == role
    ]


def _role_nodes(
    role: Role, wanted: int, revision: NodeRevision, groups: Sequence[_Group], now_s: float
) -> RoleNodes:
    own = [one for one in groups if one.role == role]
    new = [one for one in own if one.revision == revision.name]
    return RoleNodes(
        role=role,
        wanted=wanted,
        desired=sum(one.desired for one in new),
        alive=sum(len(one.alive) for one in new),
        ending=sum(one.ending for one in new),
        ready=sum(pod.ready and not pod.ends for one in new for pod in one.pods),
        gpus=revision.gpus[role],
        old=tuple(_old_nodes(one, now_s) for one in own if one.revision != revision.name),
    )


def _old_nodes(group: _Group, now_s: float) -> OldNodes:
    child = group.deployment
    served = child is not None and has_served(child, group.pods)
    workload = child.workload if child is not None else None
    gpus = [pod.gpus for pod in group.pods] + ([workload.gpus] if workload is not None else [])
    return OldNodes(
        revision=group.revision,
        desired=group.desired,
        alive=len(group.alive),
        ending=group.ending,
        holding=sum(_holds(pod, now_s) for pod in group.alive) if served else 0,
        gpus=max(gpus, default=0),
    )


def _holds(pod: ObservedPod, now_s: float) -> bool:
    if pod.stage != "running":
        return False
    if pod.ready or not pod.unready_since:
        return pod.ready
    return now_s - pod.seen.readiness < UNREADY_S


def _roll(pool: Pool, found: Targets, roles: Sequence[RoleNodes]) -> Roll:
    budget = pool.spec.gpu_budget
    short = tuple(one.role for one in roles if found.allowed[one.role] < one.wanted)
    no_room = ""
    if budget is not None and found.needed_gpus > budget:
        no_room = (
            f"{found.needed_gpus} GPUs are needed for old and new nodes beside each other,"
            f" {found.held_gpus} are held, and gpuBudget is {budget}"
        )
    return Roll(rolling=found.rolling, no_room=no_room, short=short)
