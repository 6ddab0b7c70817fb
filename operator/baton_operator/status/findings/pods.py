"""Conditions PrefillReady, DecodeReady and RouterReady: are all pods of a component ready?"""

from __future__ import annotations

from baton_operator.status import conditions as c
from baton_operator.status.view import Finding, View, add_counts, count_words
from baton_protocol.store import ROLES, Role


def role_finding(view: View, name: Role) -> Finding:
    wanted, ready = view.desired(name), view.ready(name)
    if wanted == 0:
        return Finding(c.NONE_WANTED)
    if ready >= wanted:
        return Finding(c.NODES_READY, count_words(ready, wanted))
    trouble = view.trouble(view.unready(name), name)
    short = name in view.observed.roll.short
    otherwise = Finding(c.GPU_BUDGET_REACHED if short else c.STARTING)
    return add_counts(trouble or otherwise, ready, wanted)


def router_finding(view: View) -> Finding:
    wanted, ready = view.desired("router"), view.ready("router")
    if wanted and ready >= wanted:
        return Finding(c.ROUTERS_READY, count_words(ready, wanted))
    alone = view.scales_to_zero or view.ready(*ROLES)
    waits = c.STARTING if alone else c.WAITING_FOR_NODES
    trouble = view.trouble(view.unready("router"), "router")
    if trouble is not None and trouble.reason is c.START_OVERDUE and not alone:
        trouble = None  # the router waits for nodes, and they are late
    return add_counts(trouble or Finding(waits), ready, wanted)
