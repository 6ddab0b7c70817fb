"""The number of nodes that each Deployment of a pool should have now. Pure.

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

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import msgspec

from baton_operator.rollout.budget import fit_to_budget
from baton_operator.rollout.role_nodes import RoleNodes
from baton_protocol.store import Role

OldTargets = dict[tuple[Role, str], int]


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


def compute_targets(roles: Sequence[RoleNodes], surge: int, budget: int | None) -> Targets:
    """The number of nodes of each revision now."""
    allowed = fit_to_budget(roles, budget)
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
        fewer = {
            role: max(count, current[role]) for role, count in fit_to_budget(roles, room).items()
        }
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
