"""Baton's planner as a contender: the pure function, with the memory that it returns.

In: a `PoolObservation`. Out: the decision's node counts; it also counts the decisions per reason.
"""

from __future__ import annotations

from collections import Counter

from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy, PoolObservation
from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.plan import plan_replicas
from benchmarks.support.autoscaling.reference_autoscalers import Counts


class Planned:
    def __init__(self, policy: AutoscalingPolicy) -> None:
        self.reasons: Counter[str] = Counter()
        self._policy = policy
        self._memory = PlannerMemory()

    def decide(self, situation: PoolObservation) -> Counts:
        decision, self._memory = plan_replicas(situation, self._policy, self._memory)
        self.reasons[str(decision.reason)] += 1
        return {"prefill": decision.prefill, "decode": decision.decode}
