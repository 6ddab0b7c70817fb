"""The replicas that each Deployment of a pool should have now, from its children. Pure.

In: the pool with its final numbers of nodes, its current revision, the children as last observed.
Out: a `Goal`: the current numbers for each revision, and the obstacles of a roll-out.
Level-triggered: a new operator computes the same goal from the cluster alone. `now_s` is the clock
of `FirstSeen`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.builders.child import NodeRevision
from baton_operator.kube.kinds import ChildKey
from baton_operator.rollout.role_nodes import OldNodes, RoleNodes
from baton_operator.rollout.targets import Targets, compute_targets
from baton_operator.state.child import CachedChild, has_served, pods_of
from baton_operator.state.observed import ObservedPod, Roll
from baton_protocol.store import ROLES, Role

# An old node that is unready for this long holds no requests; its GPUs are worth more.
UNREADY_S = 60.0
Children = Mapping[ChildKey, CachedChild]


class Lower(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment of an older revision gets fewer replicas, if it is the one of `version`."""

    key: ChildKey
    uid: str
    version: int
    replicas: int


class OldGoal(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment of an older revision and the replicas that it should have."""

    child: CachedChild
    role: Role
    replicas: int


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """`replicas` are those of the current revision."""

    replicas: Mapping[Role, int]
    old: tuple[OldGoal, ...] = ()
    roll: Roll = Roll()


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """One role's nodes of one revision; `pods` excludes those that have ended."""

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
    targeted = compute_targets(roles, pool.spec.rollout.surge, pool.spec.gpu_budget)
    return Goal(
        replicas=targeted.new,
        old=tuple(
            OldGoal(
                child=group.deployment,
                role=group.role,
                replicas=targeted.old[group.role, group.revision],
            )
            for group in groups
            if group.deployment is not None
            and (group.role, group.revision) in targeted.old
            # Otherwise it is deleted.
            and has_served(group.deployment, group.pods)
        ),
        roll=_roll(pool, targeted, roles),
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
    own = [group for group in groups if group.role == role]
    new = [group for group in own if group.revision == revision.name]
    return RoleNodes(
        role=role,
        wanted=wanted,
        desired=sum(group.desired for group in new),
        alive=sum(len(group.alive) for group in new),
        ending=sum(group.ending for group in new),
        ready=sum(pod.ready and not pod.ends for group in new for pod in group.pods),
        gpus=revision.gpus[role],
        old=tuple(_old_nodes(group, now_s) for group in own if group.revision != revision.name),
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


def _roll(pool: Pool, targeted: Targets, roles: Sequence[RoleNodes]) -> Roll:
    budget = pool.spec.gpu_budget
    short = tuple(nodes.role for nodes in roles if targeted.allowed[nodes.role] < nodes.wanted)
    no_room = ""
    if budget is not None and targeted.needed_gpus > budget:
        no_room = (
            f"old and new nodes together need {targeted.needed_gpus} GPUs,"
            f" {targeted.held_gpus} are held, and gpuBudget is {budget}"
        )
    return Roll(rolling=targeted.rolling, no_room=no_room, short=short)
