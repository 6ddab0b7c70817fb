"""How many of the wanted nodes a GPU budget allows. Pure.

In: each role's nodes. Out: counts; both roles give in the same proportion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton_operator.rollout.records import RoleNodes
from baton_protocol.store import Role


def fitted(roles: Sequence[RoleNodes], budget: int | None) -> dict[Role, int]:
    """As wanted where there is room for it. Else at least one of each role that is wanted, and
    where not even these have room, the prefill nodes go first: decode nodes can do without."""
    wanted = {one.role: one.wanted for one in roles}
    gpus = {one.role: one.gpus for one in roles}
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
    """With what rounding left over."""
    while fitting := [
        role
        for role, count in counts.items()
        if count < wanted[role] and _sum(counts, gpus) + gpus[role] <= budget
    ]:
        counts[min(fitting, key=lambda role: counts[role] / wanted[role])] += 1
    return counts


def _sum(counts: Mapping[Role, int], gpus: Mapping[Role, int]) -> int:
    return sum(count * gpus[role] for role, count in counts.items())
