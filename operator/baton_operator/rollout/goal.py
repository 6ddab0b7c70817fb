"""The replicas that each Deployment of a pool should have now, from its children. Pure.

In: the pool with its final numbers of nodes, its current revision, the children as last observed.
Out: a `Goal`: the current numbers for each revision, and the obstacles of a roll-out.
Level-triggered: a new operator computes the same goal from the cluster alone. `now_s` is the clock
of `FirstSeen`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from baton_operator.api.pool import Pool
from baton_operator.builders.child import NodeRevision
from baton_operator.kube.kinds import ChildKey
from baton_operator.state.child import CachedChild, has_served, pods_of
from baton_operator.state.observed import ObservedPod, Roll
from baton_protocol.store import ROLES, Role


class OldNodes(msgspec.Struct, frozen=True, kw_only=True):
    """One role's nodes of an older revision. `desired` is what their Deployment asks for; pods are
    `alive`, or `ending`. `holding`: those alive that serve, or have just ceased to. `gpus` of each.
    """

    revision: str
    desired: int = 0
    alive: int = 0
    ending: int = 0
    holding: int = 0
    gpus: int = 0

    @property
    def places(self) -> int:
        """GPUs that pods hold or will hold soon."""
        return max(self.desired, self.alive) + self.ending

    @property
    def kept(self) -> int:
        """The nodes that may be kept; an ending node never comes back."""
        return min(self.desired, self.holding)


class RoleNodes(msgspec.Struct, frozen=True, kw_only=True):
    """One role: its nodes of the current revision, of which `wanted` shall serve, and older ones.
    `ready` ones take requests. `gpus` of each new one."""

    role: Role
    wanted: int
    desired: int = 0
    alive: int = 0
    ending: int = 0
    ready: int = 0
    gpus: int = 0
    old: tuple[OldNodes, ...] = ()

    @property
    def held_gpus(self) -> int:
        new = (max(self.desired, self.alive) + self.ending) * self.gpus
        return new + sum(old_nodes.places * old_nodes.gpus for old_nodes in self.old)


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """The number of nodes that each Deployment should have now: `new` by role, `old` by role and
    revision. `rolling`: nodes of older revisions serve. `needed_gpus` are the GPUs at the peak of
    the roll-out, `held_gpus` the current ones. `allowed`: wanted nodes within the GPU budget."""

    new: Mapping[Role, int]
    old: Mapping[tuple[Role, str], int]
    allowed: Mapping[Role, int]
    rolling: bool
    needed_gpus: int
    held_gpus: int


class Lower(msgspec.Struct, frozen=True, kw_only=True):
    """A Deployment of an older revision gets fewer replicas, if it is the one of `version`."""

    key: ChildKey
    uid: str
    version: int
    replicas: int


def fitted(roles: Sequence[RoleNodes], budget: int | None) -> dict[Role, int]:
    """How many of the wanted nodes a GPU budget allows. Pure.

    In: each role's nodes. Out: counts; both roles shrink in the same proportion.

    The wanted numbers if there is room. Otherwise at least one of each wanted role; if there is no
    room even for these, prefill nodes go first, because decode nodes work without them.
    """
    wanted = {nodes.role: nodes.wanted for nodes in roles}
    gpus = {nodes.role: nodes.gpus for nodes in roles}
    need = _sum(wanted, gpus)
    if budget is None or need <= budget:
        return wanted
    counts = {
        role: max(1, count * budget // need) if count and gpus[role] else count
        for role, count in wanted.items()
    }
    for least in (1, 0):
        for role in sorted(counts, key=lambda role: (-counts[role], role != "prefill")):
            over = _sum(counts, gpus) - budget
            if over > 0 and gpus[role]:
                counts[role] = max(min(least, counts[role]), counts[role] - -(-over // gpus[role]))
    return _filled(counts, wanted, gpus, budget)


def _filled(
    counts: dict[Role, int], wanted: Mapping[Role, int], gpus: Mapping[Role, int], budget: int
) -> dict[Role, int]:
    """Adds the nodes that rounding left over."""
    while fitting := [
        role
        for role, count in counts.items()
        if count < wanted[role] and _sum(counts, gpus) + gpus[role] <= budget
    ]:
        counts[min(fitting, key=lambda role: counts[role] / wanted[role])] += 1
    return counts


def _sum(counts: Mapping[Role, int], gpus: Mapping[Role, int]) -> int:
    return sum(count * gpus[role] for role, count in counts.items())


OldTargets = dict[tuple[Role, str], int]


def targets(roles: Sequence[RoleNodes], surge: int, budget: int | None) -> Targets:
    """The number of nodes of each revision now. Pure.

    In: each role's nodes, the surge (nodes that a role may have beyond its number), the GPU budget.
    Out: `Targets`. Old nodes are removed as new ones become ready, in both roles by the share of
    the slower role. Old nodes pair only with old ones, so at least one old pair remains until all
    new nodes are ready. New nodes start as places become free. The result depends only on the
    current state.

        share      the lowest ready / wanted of the roles in the current revision
        old        wanted x (1 - share) of each role, rounded up, and at least 1 while share < 1; of
                   several older revisions the one with the most nodes stays longest
        new        wanted + surge, minus the old nodes that hold a place, within the budget
    """
    allowed = fitted(roles, budget)
    rolling = any(old.holding for nodes in roles for old in nodes.old)
    begun = any(nodes.desired and nodes.wanted for nodes in roles)
    wanted = _while_rolling(roles, allowed, budget) if rolling and begun and budget else allowed
    share = _share(roles, wanted)
    old = _old(roles, wanted, share)
    needed = _needed(roles, wanted, share) if rolling and budget else 0
    limits = dict(allowed)
    if rolling:
        limits |= {
            nodes.role: _limit(nodes, allowed[nodes.role], wanted[nodes.role], surge)
            for nodes in roles
        }
    if budget is None:
        new = limits
    else:
        first = rolling and not begun
        new = _within(roles, wanted, limits, budget, needed, first)
    return Targets(
        new=new,
        old=old,
        allowed=allowed,
        rolling=rolling,
        needed_gpus=needed,
        held_gpus=sum(nodes.held_gpus for nodes in roles),
    )


def _while_rolling(
    roles: Sequence[RoleNodes], allowed: Mapping[Role, int], budget: int
) -> Mapping[Role, int]:
    """If more nodes become wanted during a roll-out, they wait for its end if their GPUs are needed
    for it. Existing ones stay: with these alone the roll-out ends in any case."""
    if _needed(roles, allowed, _share(roles, allowed)) <= budget:
        return allowed
    current = {nodes.role: min(nodes.desired, allowed[nodes.role]) for nodes in roles}
    for room in range(min(budget, sum(allowed[nodes.role] * nodes.gpus for nodes in roles)), 0, -1):
        fewer = {role: max(count, current[role]) for role, count in fitted(roles, room).items()}
        serves = all(fewer[role] for role, count in allowed.items() if count)
        if serves and _needed(roles, fewer, _share(roles, fewer)) <= budget:
            return fewer
    return allowed


def _share(roles: Sequence[RoleNodes], wanted: Mapping[Role, int]) -> Fraction:
    shares = [Fraction(nodes.ready, wanted[nodes.role]) for nodes in roles if wanted[nodes.role]]
    return min([Fraction(1), *shares])


def _old(roles: Sequence[RoleNodes], wanted: Mapping[Role, int], share: Fraction) -> OldTargets:
    order = _by_size(roles)
    counts: OldTargets = {}
    for nodes in roles:
        left = math.ceil(wanted[nodes.role] * (1 - share))
        for old in sorted(nodes.old, key=lambda old: order.index(old.revision)):
            least = 1 if share < 1 and old.revision == order[0] else 0
            count = min(old.kept, max(left, least))
            counts[nodes.role, old.revision] = count
            left = max(0, left - count)
    return counts


def _by_size(roles: Sequence[RoleNodes]) -> list[str]:
    """The older revisions, the one with most nodes first."""
    sizes: dict[str, int] = {}
    for nodes in roles:
        for old in nodes.old:
            sizes[old.revision] = sizes.get(old.revision, 0) + old.kept
    return sorted(sizes, key=lambda revision: (-sizes[revision], revision))


def _needed(roles: Sequence[RoleNodes], wanted: Mapping[Role, int], share: Fraction) -> int:
    """GPUs at the step that takes most of those to come: what is kept of the old ones, and one more
    new node of each role than the step needs."""
    if share == 1:
        return 0
    steps = {
        Fraction(count, wanted[nodes.role])
        for nodes in roles
        for count in range(wanted[nodes.role])
    }
    left = {share, *(step for step in steps if step > share)}
    return max(_at(roles, wanted, step) for step in left)


def _at(roles: Sequence[RoleNodes], wanted: Mapping[Role, int], share: Fraction) -> int:
    old = _old(roles, wanted, share)
    kept = sum(
        old[nodes.role, old_nodes.revision] * old_nodes.gpus
        for nodes in roles
        for old_nodes in nodes.old
    )
    more = {role: math.floor(count * share) + 1 for role, count in wanted.items()}
    new = [
        min(wanted[nodes.role], max(nodes.desired, more[nodes.role])) * nodes.gpus
        for nodes in roles
    ]
    return kept + sum(new)


def _limit(nodes: RoleNodes, allowed: int, wanted: int, surge: int) -> int:
    """New nodes allowed in a roll-out if GPUs were unlimited. Existing ones stay."""
    old = sum(old_nodes.places for old_nodes in nodes.old)
    return max(min(nodes.desired, allowed), min(wanted, wanted + surge - old))


def _within(
    roles: Sequence[RoleNodes],
    wanted: Mapping[Role, int],
    limits: Mapping[Role, int],
    budget: int,
    needed: int,
    first: bool,
) -> dict[Role, int]:
    """As many of `limits` as there are GPUs for now. The role that is behind comes first, and no
    other takes what it waits for. The `first` step is one of each role or none."""
    room = budget - sum(nodes.held_gpus for nodes in roles)
    gpus = {nodes.role: nodes.gpus for nodes in roles}
    new = {nodes.role: min(nodes.desired, limits[nodes.role]) for nodes in roles}
    step = sum(gpus[role] for role in new if limits[role] > new[role])
    if first and (needed > budget or room < step):
        return new
    new |= {role: limits[role] for role in new if not gpus[role]}
    while (role := _next(new, wanted, limits, gpus, room)) is not None:
        new[role] += 1
        room -= gpus[role]
    return new


def _next(
    new: Mapping[Role, int],
    wanted: Mapping[Role, int],
    limits: Mapping[Role, int],
    gpus: Mapping[Role, int],
    room: int,
) -> Role | None:
    """The role that gets one more. GPUs are reserved for roles further behind that cannot grow
    yet."""
    behind = [role for role in new if new[role] < wanted[role] and gpus[role]]
    for role in sorted(behind, key=lambda role: new[role] / wanted[role]):
        if new[role] < limits[role]:
            return role if gpus[role] <= room else None
        room -= gpus[role]
    return None


# An old node that is unready for this long holds no requests; its GPUs are worth more.
UNREADY_S = 60.0

Children = Mapping[ChildKey, CachedChild]


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
    targeted = targets(roles, pool.spec.rollout.surge, pool.spec.gpu_budget)
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
