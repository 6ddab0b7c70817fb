"""One case per fall-back of a step, with the counts, and what the pool's status says about it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from baton_operator.autoscaling.planner.inputs import AutoscalingPolicy
from baton_operator.autoscaling.planner.reasons import StepFallback
from baton_operator.state.observed import Planned
from tests.support.kubernetes.manifests import sample_pool
from tests.support.planner.builders import bounded, decide, observed_pool
from tests.support.planner.observations import observed, status_of

POOL = sample_pool("sim", autoscaling={"mode": "auto", "prefill": {"max": 9}, "decode": {"max": 9}})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pool without known demand: only the owner's limits move it."""

    fallback: StepFallback
    current: tuple[int, int]
    policy: AutoscalingPolicy
    counts: tuple[int, int]


CASES = [
    Case(
        fallback=StepFallback.NONE,
        current=(1, 1),
        policy=bounded((2, 9), (1, 9)),
        counts=(2, 1),
    ),
    Case(  # two nodes grow to four at most
        fallback=StepFallback.RATIO_BEFORE_RATE,
        current=(2, 1),
        policy=bounded((3, 9), (3, 4), ratio_min=2.0),
        counts=(6, 3),
    ),
    Case(  # decode must go from 3 to 1, at most by 1, and prefill to 0, which was not checked
        fallback=StepFallback.LIMITS_BEFORE_LOAD,
        current=(1, 3),
        policy=bounded((0, 1), (1, 2), gpu_budget=2),
        counts=(0, 2),
    ),
    Case(  # decode has to go from 5 to 2, at most by 1
        fallback=StepFallback.TOWARDS_RATIO,
        current=(2, 5),
        policy=bounded((1, 2), (1, 9), ratio_min=1.0),
        counts=(2, 4),
    ),
    Case(
        fallback=StepFallback.BUDGET_BEFORE_RATE,
        current=(5, 3),
        policy=bounded((1, 9), (1, 9), gpu_budget=4),
        counts=(2, 2),
    ),
    Case(  # a prefill node must be gone before the second decode node is created
        fallback=StepFallback.BUDGET_BEFORE_RATIO_AND_GROWTH,
        current=(1, 1),
        policy=bounded((0, 1), (2, 2), gpu_budget=2),
        counts=(0, 1),
    ),
    Case(
        fallback=StepFallback.BUDGET_BEFORE_MINIMUM,
        current=(1, 2),
        policy=bounded((1, 9), (2, 9), gpu_budget=2),
        counts=(1, 1),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.fallback))
def test_the_status_says_which_limits_gave_way(case: Case) -> None:
    decision = decide(observed_pool(*case.current, demand=None), case.policy)
    assert ((decision.prefill, decision.decode), decision.fallback) == (case.counts, case.fallback)
    planned = Planned(
        mode="auto",
        prefill=decision.prefill,
        decode=decision.decode,
        reason=str(decision.reason),
        message=decision.message,
    )
    written = status_of(observed(POOL, planned=planned), POOL).autoscaling
    assert written is not None
    sentence = f"; this step ({case.fallback}): {case.fallback.meaning}"
    assert written.message.endswith(sentence) == (case.fallback != StepFallback.NONE)
    assert ("this step" in written.message) == (case.fallback != StepFallback.NONE)


def test_every_fallback_has_a_case() -> None:
    assert [case.fallback for case in CASES] == list(StepFallback)
