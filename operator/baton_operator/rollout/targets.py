"""How many nodes of which revision there shall be now. Pure.

In: what is known of each role's nodes, how many a role may have beyond its number, the GPU budget.
Out: `Targets`. Old nodes go as new ones get ready, in both roles by the share of the role that is
behind: old meets only old, and until all new ones are ready a pair of old ones is there. New nodes
come as places get free. All follows from what is seen now, so that it may be asked at any moment.

    share      the least of ready / wanted among roles of the current revision
    old        wanted x (1 - share) of each role, rounded up, and at least 1 while share < 1; of
               several older revisions the one with most nodes stays longest
    new        wanted + surge, less the old ones that take a place, and within the budget
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from baton_operator.rollout.gpu_budget import fitted
from baton_operator.rollout.records import RoleNodes, Targets
from baton_protocol.store import Role

OldTargets = dict[tuple[Role, str], int]


def targets(roles: Sequence[RoleNodes], surge: int, budget: int | None) -> Targets:
    allowed = fitted(roles, budget)
    rolling = any(old.holding for one in roles for old in one.old)
    begun = any(one.desired and one.wanted for one in roles)
    wanted = _while_rolling(roles, allowed, budget) if rolling and begun and budget else allowed
    share = _share(roles, wanted)
    old = _old(roles, wanted, share)
    needed = _needed(roles, wanted, share) if rolling and budget else 0
    limits = dict(allowed)
    if rolling:
        limits |= {
            one.role: _limit(one, allowed[one.role], wanted[one.role], surge) for one in roles
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
        held_gpus=sum(one.held_gpus for one in roles),
    )


def _while_rolling(
    roles: Sequence[RoleNodes], allowed: Mapping[Role, int], budget: int
) -> Mapping[Role, int]:
    """If more nodes are wanted in the middle of a roll-out, they wait for its end where their GPUs
    are needed for it. Those there are stay: with these alone it ends in any case."""
    if _needed(roles, allowed, _share(roles, allowed)) <= budget:
        return allowed
    there = {one.role: min(one.desired, allowed[one.role]) for one in roles}
    for room in range(min(budget, sum(allowed[one.role] * one.gpus for one in roles)), 0, -1):
        fewer = {role: max(count, there[role]) for role, count in fitted(roles, room).items()}
        serves = all(fewer[role] for role, count in allowed.items() if count)
        if serves and _needed(roles, fewer, _share(roles, fewer)) <= budget:
            return fewer
    return allowed


def _share(roles: Sequence[RoleNodes], wanted: Mapping[Role, int]) -> Fraction:
    shares = [Fraction(one.ready, wanted[one.role]) for one in roles if wanted[one.role]]
    return min([Fraction(1), *shares])


def _old(roles: Sequence[RoleNodes], wanted: Mapping[Role, int], share: Fraction) -> OldTargets:
    order = _by_size(roles)
    found: OldTargets = {}
    for one in roles:
        left = math.ceil(wanted[one.role] * (1 - share))
        for old in sorted(one.old, key=lambda old: order.index(old.revision)):
            least = 1 if share < 1 and old.revision == order[0] else 0
            count = min(old.kept, max(left, least))
            found[one.role, old.revision] = count
            left = max(0, left - count)
    return found


def _by_size(roles: Sequence[RoleNodes]) -> list[str]:
    """The older revisions, that with most nodes first."""
    sizes: dict[str, int] = {}
    for one in roles:
        for old in one.old:
            sizes[old.revision] = sizes.get(old.revision, 0) + old.kept
    return sorted(sizes, key=lambda revision: (-sizes[revision], revision))


def _needed(roles: Sequence[RoleNodes], wanted: Mapping[Role, int], share: Fraction) -> int:
    """GPUs at the step that takes most of those to come: what is kept of the old ones, and one more
    new node of each role than the step needs."""
    if share == 1:
        return 0
    steps = {
        Fraction(count, wanted[one.role]) for one in roles for count in range(wanted[one.role])
    }
    left = {share, *(step for step in steps if step > share)}
    return max(_at(roles, wanted, step) for step in left)


def _at(roles: Sequence[RoleNodes], wanted: Mapping[Role, int], share: Fraction) -> int:
    old = _old(roles, wanted, share)
    kept = sum(old[one.role, each.revision] * each.gpus for one in roles for each in one.old)
    more = {role: math.floor(count * share) + 1 for role, count in wanted.items()}
    new = [min(wanted[one.role], max(one.desired, more[one.role])) * one.gpus for one in roles]
    return kept + sum(new)


def _limit(one: RoleNodes, allowed: int, wanted: int, surge: int) -> int:
    """New nodes that there may be in a roll-out, were there GPUs for all. Those there are stay."""
    old = sum(each.places for each in one.old)
    return max(min(one.desired, allowed), min(wanted, wanted + surge - old))


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
    room = budget - sum(one.held_gpus for one in roles)
    gpus = {one.role: one.gpus for one in roles}
    new = {one.role: min(one.desired, limits[one.role]) for one in roles}
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
    """Which gets one more. For those further behind, that may not grow yet, GPUs are kept."""
    behind = [role for role in new if new[role] < wanted[role] and gpus[role]]
    for role in sorted(behind, key=lambda role: new[role] / wanted[role]):
        if new[role] < limits[role]:
            return role if gpus[role] <= room else None
        room -= gpus[role]
    return None
