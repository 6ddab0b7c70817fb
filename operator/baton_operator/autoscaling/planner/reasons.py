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
        Reason.STEADY: Explained("there are as many nodes as the load needs"),
        Reason.DEMAND_ROSE: Explained("the load of now needs more nodes to hold the targets"),
        Reason.TREND_ROSE: Explained(
            "the load grows, and will need more nodes by the time that a new one serves"
        ),
        Reason.BACKLOG_GREW: Explained(
            "prompts are queued that the nodes cannot work off by the time that a new one serves"
        ),
        Reason.TARGET_MISSED: Explained(
            "clients measure more than a target although the numbers say there are enough nodes; "
            "one more is tried",
            "if it comes often: something else slows the nodes down; look at their step times",
        ),
        Reason.TARGET_UNREACHABLE: Explained(
            "one request alone on a node takes longer than a target: more nodes help only the wait",
            "raise the target, use faster GPUs or tensor parallelism, or send shorter prompts",
        ),
        Reason.DEMAND_FELL: Explained("fewer nodes hold the targets, for the whole down window"),
        Reason.STORE_LIMITED: Explained(
            "the KV store is read as fast as it can be: more prefill nodes would only wait too",
            "add data servers or give them more network, and raise `storeReadPerSecond`",
        ),
        Reason.CAPACITY_COMING: Explained(
            "more nodes are needed than serve, and they are on their way",
            "if it stays: see conditions PrefillReady and DecodeReady",
        ),
        Reason.DEMAND_UNKNOWN: Explained(
            "nobody says what clients ask for: the nodes stay as they are",
            "check that routers and nodes reach the index, and the operator too",
        ),
        Reason.DEMAND_STALE: Explained(
            "what clients ask for is known from too long ago: the nodes stay as they are",
            "check that routers and nodes reach the index, and the operator too",
        ),
        Reason.CAPABILITY_UNKNOWN: Explained(
            "no node has reported yet how fast it is: the nodes stay as they are",
            "wait for the first node to be ready; if it stays, look at the nodes' logs",
        ),
        Reason.NODES_SILENT: Explained(
            "a ready node sends no reports, so nobody knows what it does: its role does not shrink",
            "look at the node that the message names",
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
            "the other role's number asks for more nodes of this one, by the ratio",
            "widen the ratio if the nodes are idle",
        ),
        Reason.RATIO_LIMITED: Explained(
            "the other role's number allows fewer nodes of this one, by the ratio",
            "raise the other role's maximum, or widen the ratio",
        ),
        Reason.BUDGET_LIMITED: Explained(
            "both roles together need more GPUs than the budget; each gets about the same share",
            "raise the GPU budget",
        ),
        Reason.BUDGET_SHIFT: Explained(
            "the budget is spent, and the other role needs this one's nodes more"
        ),
        Reason.BUDGET_WAITS: Explained(
            "nodes that are to go still hold GPUs of the budget; the others come after them",
            "if it stays: see what drains, and for how long",
        ),
        Reason.BUDGET_TOO_SMALL: Explained(
            "the minima need more GPUs than the budget", "raise the budget, or lower a minimum"
        ),
        Reason.UP_STABILISING: Explained(
            "more nodes are needed, but not yet for the whole up window"
        ),
        Reason.UP_STEP: Explained("more nodes are needed than may be added at once; more follow"),
        Reason.DOWN_STABILISING: Explained(
            "fewer nodes would do, but not yet for the whole down window"
        ),
        Reason.DOWN_STEP: Explained("fewer nodes are needed than may go at once; more follow"),
        Reason.CONSOLIDATION_REFUSED: Explained(
            "by the rates fewer nodes would do; by what the nodes hold and clients measure they "
            "would miss a target"
        ),
        Reason.DRAIN_RUNNING: Explained(
            "fewer nodes would do, and the one that was chosen before is not gone yet",
            "if it stays: the message names the node",
        ),
        Reason.ROLL_OUT_RUNNING: Explained("fewer nodes would do, but not while a roll-out runs"),
        Reason.IDLE: Explained("nobody asked for anything for long enough: the pool goes to sleep"),
        Reason.ASLEEP: Explained("the pool sleeps; a request wakes it and is held meanwhile"),
        Reason.WOKEN: Explained("a request came, or a schedule began: the pool wakes"),
    }
)


def table() -> str:
    """The table in Markdown."""
    rows = [f"| `{reason}` | {one.meaning} | {one.remedy} |" for reason, one in REASONS.items()]
    return "\n".join(("| reason | what it means | what to do |", "|---|---|---|", *rows))


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
