"""Every reason of a decision: what it means, and what to do where somebody can do something.

`python -m baton_operator.autoscaling.planner.reasons` prints the table in docs/operations/scale.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MappingProxyType

from baton_operator.autoscaling.planner.records import Reason


@dataclass(frozen=True, slots=True)
class Explained:
    meaning: str
    remedy: str = "nothing"


REASONS = MappingProxyType(
    {
        Reason.STEADY: Explained("the number of nodes matches the load"),
        Reason.DEMAND_ROSE: Explained("the current load needs more nodes to meet the targets"),
        Reason.TREND_ROSE: Explained(
            "the load grows and needs more nodes by the time that a new node can serve"
        ),
        Reason.BACKLOG_GREW: Explained(
            "the nodes cannot compute the queued prompts by the time that a new node can serve"
        ),
        Reason.TARGET_MISSED: Explained(
            "clients measure more than a target although the planner's model says that there "
            "are enough nodes; the planner adds one",
            "if this happens often, something else slows the nodes down: check their step times",
        ),
        Reason.TARGET_UNREACHABLE: Explained(
            "a single request on a node misses a target, so more nodes only shorten the queue",
            "raise the target, use faster GPUs, or send shorter prompts",
        ),
        Reason.DEMAND_FELL: Explained(
            "fewer nodes have met the targets for the whole scale-down window"
        ),
        Reason.STORE_LIMITED: Explained(
            "reads from the KV store are at their limit: more prefill nodes would only wait for it",
            "add data servers or give them more network, and raise `storeReadPerSecond`",
        ),
        Reason.CAPACITY_COMING: Explained(
            "more nodes are needed than are ready, and they are starting",
            "if this persists, see conditions PrefillReady and DecodeReady",
        ),
        Reason.DEMAND_UNKNOWN: Explained(
            "no router has reported its load: the number of nodes stays",
            "check that routers, nodes and the operator can reach the index",
        ),
        Reason.DEMAND_STALE: Explained(
            "the latest load reports are too old: the number of nodes stays",
            "check that routers, nodes and the operator can reach the index",
        ),
        Reason.CAPABILITY_UNKNOWN: Explained(
            "no node has reported its speed yet: the number of nodes stays",
            "wait for the first node to be ready; if this persists, check the nodes' logs",
        ),
        Reason.NODES_SILENT: Explained(
            "a ready node sends no reports, so its load is unknown: its role does not shrink",
            "check the node that the message names",
        ),
        Reason.AT_MINIMUM: Explained("the load needs fewer nodes than the minimum"),
        Reason.AT_MAXIMUM: Explained(
            "the load needs more nodes than the maximum", "raise the maximum"
        ),
        Reason.SCHEDULE_MINIMUM: Explained("a schedule keeps more nodes than the load needs"),
        Reason.SCHEDULE_MAXIMUM: Explained(
            "a schedule allows fewer nodes than the load needs", "change the schedule"
        ),
        Reason.RATIO_RAISED: Explained(
            "the ratio to the other role requires more nodes of this role",
            "widen the ratio if these nodes are idle",
        ),
        Reason.RATIO_LIMITED: Explained(
            "the ratio to the other role allows fewer nodes of this role",
            "raise the other role's maximum, or widen the ratio",
        ),
        Reason.BUDGET_LIMITED: Explained(
            "both roles together need more GPUs than the budget; each gets about the "
            "same share of its need",
            "raise the GPU budget",
        ),
        Reason.BUDGET_SHIFT: Explained(
            "the budget is used up, and the other role needs this role's GPUs more"
        ),
        Reason.BUDGET_WAITS: Explained(
            "draining nodes still hold GPUs of the budget; new nodes follow once they are gone",
            "if this persists, check which nodes drain, and for how long",
        ),
        Reason.BUDGET_TOO_SMALL: Explained(
            "the minimums need more GPUs than the budget", "raise the budget, or lower a minimum"
        ),
        Reason.UP_STABILISING: Explained(
            "more nodes are needed, but not yet for the whole scale-up window"
        ),
        Reason.UP_STEP: Explained("more nodes are needed than one step may add; more follow"),
        Reason.DOWN_STABILISING: Explained(
            "fewer nodes would suffice, but not yet for the whole scale-down window"
        ),
        Reason.DOWN_STEP: Explained("fewer nodes are needed than one step may remove; more follow"),
        Reason.CONSOLIDATION_REFUSED: Explained(
            "the rates need fewer nodes, but their current load and the clients' latencies "
            "show that fewer would miss a target"
        ),
        Reason.DRAIN_RUNNING: Explained(
            "fewer nodes would suffice, but the node chosen before is still draining",
            "if this persists, check the node that the message names",
        ),
        Reason.ROLL_OUT_RUNNING: Explained(
            "fewer nodes would suffice, but a roll-out is in progress"
        ),
        Reason.IDLE: Explained(
            "no request arrived for scaleToZeroAfterSeconds: the pool scales to zero"
        ),
        Reason.ASLEEP: Explained(
            "the pool is scaled to zero; routers hold the next request and it wakes the pool"
        ),
        Reason.WOKEN: Explained(
            "a request arrived or a schedule began: the pool scales up from zero"
        ),
    }
)


def table() -> str:
    """The table in Markdown."""
    rows = [
        f"| `{reason}` | {explained.meaning} | {explained.remedy} |"
        for reason, explained in REASONS.items()
    ]
    return "\n".join(("| reason | what it means | what to do |", "|---|---|---|", *rows))


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
