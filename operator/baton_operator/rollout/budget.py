"""How many of the wanted nodes a GPU budget allows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton_operator.rollout.role_nodes import RoleNodes
from baton_protocol.store import Role


def fit_to_budget(roles: Sequence[RoleNodes], budget: int | None) -> dict[Role, int]:
    """Counts by role; both roles shrink in the same proportion.

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
    return _fill_rest(counts, wanted, gpus, budget)


def _fill_rest(
    counts: dict[Role, int], wanted: Mapping[Role, int], gpus: Mapping[Role, int], budget: int
) -> dict[Role, int]:
    """Add the nodes that rounding left over."""
    while fitting := [
        role
        for role, count in counts.items()
        if count < wanted[role] and _sum(counts, gpus) + gpus[role] <= budget
    ]:
        counts[min(fitting, key=lambda role: counts[role] / wanted[role])] += 1
    return counts


def _sum(counts: Mapping[Role, int], gpus: Mapping[Role, int]) -> int:
    return sum(count * gpus[role] for role, count in counts.items())
