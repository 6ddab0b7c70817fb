"""What condition RolloutBlocked is to say, from a `View`."""

from __future__ import annotations

from baton_operator.status import conditions as c
from baton_operator.status.messages import count_words, old_nodes
from baton_operator.status.view import Finding, View
from baton_protocol.store import ROLES


def rollout_blocked(view: View) -> Finding:
    """The first that is in the way. Who has to mend it comes before what the operator waits for."""
    left = old_nodes(view)
    if not left:
        return Finding(c.NOT_ROLLING)
    seen = view.observed
    if seen.roll.no_room:
        return Finding(c.GPU_BUDGET_TOO_SMALL, seen.roll.no_room)
    new = [pod for pod in view.pods(*ROLES) if view.is_current(pod)]
    trouble = view.trouble([pod for pod in new if not pod.ready], *ROLES)
    if trouble is not None:
        return Finding(c.NEW_NODES_FAILING, f"{trouble.reason.name}: {trouble.message}")
    held = [f"{each.role}: {each.words}" for each in seen.departures if each.held]
    if held:
        return Finding(c.OLD_NODES_HELD, "; ".join(held))
    ready = count_words(sum(pod.ready for pod in new), view.desired(*ROLES))
    return Finding(c.ROLLING, f"{left} old nodes are left; {ready}")
