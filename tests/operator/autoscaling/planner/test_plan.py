"""A decision's message and numbers, and what the planner remembers."""

from __future__ import annotations

from dataclasses import replace

from baton_operator.autoscaling.planner.memory import PlannerMemory
from baton_operator.autoscaling.planner.plan import plan_replicas
from tests.support.planner.builders import NOW, POLICY, decide, demand, observed_pool


def test_the_message_explains_the_numbers_of_both_roles() -> None:
    decision = decide(observed_pool(2, 2, 20.0))
    assert decision.message == (
        "prefill 2 -> 3 (DemandRose: 18,000 uncached prompt tokens/s, "
        "a node computes 10,000 tokens/s, 3 needed for TTFT 2 s); "
        "decode 2 (Steady: 4,000 output tokens/s, 67 live requests with "
        "1,015 tokens of KV each, a node holds 198 at ITL 50 ms, 2 needed)"
    )
    assert decision.numbers["prefill_tokens_per_s"] == 18_000.0
    assert decision.numbers["decode_live_requests"] == 67.0
    assert decision.numbers["prefill_needed"] == 3.0


def test_a_report_that_several_decisions_see_is_remembered_once() -> None:
    """If reading the index fails, the next observation has the same numbers at a higher age."""
    fresh = observed_pool(2, 2, demand=demand(10.0, age_s=3.0))
    _, memory = plan_replicas(fresh, POLICY, PlannerMemory())
    again = observed_pool(2, 2, demand=demand(10.0, age_s=18.0), at_s=NOW + 15.0)
    _, memory = plan_replicas(again, POLICY, memory)
    assert [sample.at_s for sample in memory.demand] == [NOW - 3.0]
    assert [past.at_s for past in memory.recommendations] == [NOW, NOW + 15.0]


def test_memory_is_bounded_and_is_cleared_when_the_clock_goes_back() -> None:
    policy = replace(POLICY, down_stabilization_s=1e9)
    memory = PlannerMemory()
    for turn in range(1100):
        _, memory = plan_replicas(observed_pool(at_s=NOW + turn), policy, memory)
    assert len(memory.recommendations) == 1024
    assert len(memory.demand) == 1024
    _, memory = plan_replicas(observed_pool(at_s=5.0), policy, memory)
    assert memory.since_s == 5.0
    assert [past.at_s for past in memory.recommendations] == [5.0]
