"""Baton's planner as a contender: the pure function, with the memory that it returns.

In: a `Situation`. Out: the decision's node counts; it also counts the decisions per reason.
"""

from __future__ import annotations

from collections import Counter

from baton_operator.autoscaling.planner.decision.plan import Memory, plan
from baton_operator.autoscaling.planner.records import Policy, Situation
from benchmarks.support.autoscaling.reference_autoscalers import Counts


class Planned:
    def __init__(self, policy: Policy) -> None:
        self.reasons: Counter[str] = Counter()
        self._policy = policy
        self._memory = Memory()

    def decide(self, situation: Situation) -> Counts:
        decision, self._memory = plan(situation, self._policy, self._memory)
        self.reasons[str(decision.reason)] += 1
        return {"prefill": decision.prefill, "decode": decision.decode}
