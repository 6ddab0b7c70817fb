"""Every reason of a decision, and every fall-back of a step: what it means, and what to do.

`python -m baton_operator.autoscaling.planner.reasons` prints the tables in
docs/operations/scale.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum
from typing import Self


class Explained(StrEnum):
    """A word in the status, with its meaning and what somebody can do."""

    meaning: str
    remedy: str

    def __new__(cls, word: str, meaning: str, remedy: str = "nothing") -> Self:
        member = str.__new__(cls, word)
        member._value_ = word
        member.meaning, member.remedy = meaning, remedy
        return member


class ScalingReason(Explained):
    """Why a decision is what it is: the rule that bound it last."""

    # The load.
    STEADY = (
        "Steady",
        "the number of nodes matches the load",
    )
    DEMAND_ROSE = (
        "DemandRose",
        "the current load needs more nodes to meet the targets",
    )
    TREND_ROSE = (
        "TrendRose",
        "the load grows and needs more nodes by the time that a new node can serve",
    )
    BACKLOG_GREW = (
        "BacklogGrew",
        "the nodes cannot compute the queued prompts by the time that a new node can serve",
    )
    TARGET_MISSED = (
        "TargetMissed",
        "clients measure more than a target although the planner's model says that there are "
        "enough nodes; the planner adds one",
        "if this happens often, something else slows the nodes down: check their step times",
    )
    TARGET_UNREACHABLE = (
        "TargetUnreachable",
        "a single request on a node misses a target, so more nodes only shorten the queue",
        "raise the target, use faster GPUs, or send shorter prompts",
    )
    DEMAND_FELL = (
        "DemandFell",
        "fewer nodes have met the targets for the whole scale-down window",
    )
    STORE_LIMITED = (
        "StoreLimited",
        "reads from the KV store are at their limit: more prefill nodes would only wait for it",
        "add data servers or give them more network, and raise `storeReadPerSecond`",
    )
    CAPACITY_COMING = (
        "CapacityComing",
        "more nodes are needed than are ready, and they are starting",
        "if this persists, see conditions PrefillReady and DecodeReady",
    )
    # Unknown inputs.
    DEMAND_UNKNOWN = (
        "DemandUnknown",
        "no router has reported its load: the number of nodes stays",
        "check that routers, nodes and the operator can reach the index",
    )
    DEMAND_STALE = (
        "DemandStale",
        "the latest load reports are too old: the number of nodes stays",
        "check that routers, nodes and the operator can reach the index",
    )
    CAPABILITY_UNKNOWN = (
        "CapabilityUnknown",
        "no node has reported its speed yet: the number of nodes stays",
        "wait for the first node to be ready; if this persists, check the nodes' logs",
    )
    NODES_SILENT = (
        "NodesSilent",
        "a ready node sends no reports, so its load is unknown: its role does not shrink",
        "check the node that the message names",
    )
    # The owner's limits.
    AT_MINIMUM = (
        "AtMinimum",
        "the load needs fewer nodes than the minimum",
    )
    AT_MAXIMUM = (
        "AtMaximum",
        "the load needs more nodes than the maximum",
        "raise the maximum",
    )
    SCHEDULE_MINIMUM = (
        "ScheduleMinimum",
        "a schedule keeps more nodes than the load needs",
    )
    SCHEDULE_MAXIMUM = (
        "ScheduleMaximum",
        "a schedule allows fewer nodes than the load needs",
        "change the schedule",
    )
    RATIO_RAISED = (
        "RatioRaised",
        "the ratio to the other role requires more nodes of this role",
        "widen the ratio if these nodes are idle",
    )
    RATIO_LIMITED = (
        "RatioLimited",
        "the ratio to the other role allows fewer nodes of this role",
        "raise the other role's maximum, or widen the ratio",
    )
    BUDGET_LIMITED = (
        "BudgetLimited",
        "both roles together need more GPUs than the budget; each gets about the same share "
        "of its need",
        "raise the GPU budget",
    )
    BUDGET_SHIFT = (
        "BudgetShift",
        "the budget is used up, and the other role needs this role's GPUs more",
    )
    BUDGET_WAITS = (
        "BudgetWaits",
        "draining nodes still hold GPUs of the budget; new nodes follow once they are gone",
        "if this persists, check which nodes drain, and for how long",
    )
    BUDGET_TOO_SMALL = (
        "BudgetTooSmall",
        "the minimums need more GPUs than the budget",
        "raise the budget, or lower a minimum",
    )
    # Rates.
    UP_STABILISING = (
        "UpStabilising",
        "more nodes are needed, but not yet for the whole scale-up window",
    )
    UP_STEP = (
        "UpStep",
        "more nodes are needed than one step may add; more follow",
    )
    DOWN_STABILISING = (
        "DownStabilising",
        "fewer nodes would suffice, but not yet for the whole scale-down window",
    )
    DOWN_STEP = (
        "DownStep",
        "fewer nodes are needed than one step may remove; more follow",
    )
    CONSOLIDATION_REFUSED = (
        "ConsolidationRefused",
        "the rates need fewer nodes, but their current load and the clients' latencies show "
        "that fewer would miss a target",
    )
    DRAIN_RUNNING = (
        "DrainRunning",
        "fewer nodes would suffice, but the node chosen before is still draining",
        "if this persists, check the node that the message names",
    )
    ROLL_OUT_RUNNING = (
        "RollOutRunning",
        "fewer nodes would suffice, but a roll-out is in progress",
    )
    # Scale to zero and wake-up.
    IDLE = (
        "Idle",
        "no request arrived for scaleToZeroAfterSeconds: the pool scales to zero",
    )
    ASLEEP = (
        "Asleep",
        "the pool is scaled to zero; routers hold the next request and it wakes the pool",
    )
    NODES_ASLEEP = (
        "NodesAsleep",
        "no request arrived for sleepAfterSeconds: the nodes stay, and their engines sleep until "
        "a request arrives",
    )
    WOKEN = (
        "Woken",
        "a request arrived or a schedule began: the pool scales up from zero",
    )


class StepFallback(Explained):
    """Which limits gave way in a step that could not keep all of them, in the order in which the
    fall-backs are tried."""

    NONE = (
        "AllLimitsKept",
        "the step keeps all limits; the message does not mention it",
    )
    RATIO_BEFORE_RATE = (
        "RatioBeforeRate",
        "a role grows faster than `scaleUp.factor`, because the ratio to the other role needs it",
    )
    LIMITS_BEFORE_LOAD = (
        "LimitsBeforeLoad",
        "a role shrinks although its current load may need the nodes, because the ratio or the "
        "budget needs it",
        "widen the ratio, or raise the GPU budget or the other role's maximum",
    )
    TOWARDS_RATIO = (
        "TowardsRatio",
        "no step within the rates has the ratio, so this one does not keep it",
        "if this persists, see the reason of the role that does not change",
    )
    BUDGET_BEFORE_RATE = (
        "BudgetBeforeRate",
        "nodes are removed at once, because they need more GPUs than the budget",
        "nothing, or raise the GPU budget",
    )
    BUDGET_BEFORE_RATIO_AND_GROWTH = (
        "BudgetBeforeRatioAndGrowth",
        "the budget has no room for the ratio, or none yet to grow each role to its minimum",
        "if this persists, check which nodes drain, raise the GPU budget, or widen the ratio",
    )
    BUDGET_BEFORE_MINIMUM = (
        "BudgetBeforeMinimum",
        "nodes are removed below the minimum, because the minimums need more GPUs than the budget",
        "raise the budget, or lower a minimum",
    )


def reasons_table() -> str:
    """The table of reasons in Markdown."""
    return _table("reason", ScalingReason)


def fallbacks_table() -> str:
    return _table("fall-back", StepFallback)


def _table(heading: str, members: Iterable[Explained]) -> str:
    rows = [f"| `{member}` | {member.meaning} | {member.remedy} |" for member in members]
    return "\n".join((f"| {heading} | what it means | what to do |", "|---|---|---|", *rows))


if __name__ == "__main__":
    sys.stdout.write(f"{reasons_table()}\n\n{fallbacks_table()}\n")
