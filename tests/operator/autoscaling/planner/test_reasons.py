"""One case per reason, with the counts and the message; the tables in docs/operations/scale.md."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    Phase,
    PoolObservation,
    ScheduledRange,
)
from baton_operator.autoscaling.planner.memory import (
    DemandSample,
    PastRecommendation,
    PlannerMemory,
)
from baton_operator.autoscaling.planner.plan import plan_replicas
from baton_operator.autoscaling.planner.reasons import (
    ScalingReason,
    StepFallback,
    fallbacks_table,
    reasons_table,
)
from tests.support.planner.builders import (
    NODE,
    NOW,
    POLICY,
    bounded,
    demand,
    memory_of_needs,
    node,
    nodes,
    observed_pool,
)

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "operations" / "scale.md").read_text()
ZERO = replace(POLICY, scale_to_zero_after_s=300.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    reason: ScalingReason
    observation: PoolObservation
    prefill: int
    decode: int
    message: str  # a part of the decision's message
    policy: AutoscalingPolicy = POLICY
    memory: PlannerMemory = field(default_factory=memory_of_needs)


def growing() -> PlannerMemory:
    """Return a memory of demand that rose from 9 to 17 requests per second in two minutes."""
    seen = tuple(
        DemandSample(
            at_s=NOW - 15.0 * back,
            requests=17.0 - back,
            prompt=900.0 * (17.0 - back),
            output=200.0 * (17.0 - back),
            live=None,
        )
        for back in range(8, 0, -1)
    )
    return replace(memory_of_needs(), demand=seen)


def queued(tokens: int) -> PoolObservation:
    """Return a pool whose demand needs exactly its three prefill nodes, each with a queue."""
    calm = observed_pool(3, 2, 20.0)
    filled = tuple(
        replace(ready, queued_tokens=tokens) if ready.role == "prefill" else ready
        for ready in calm.nodes
    )
    return replace(calm, nodes=filled)


def with_nodes(observation: PoolObservation, **changes: object) -> PoolObservation:
    """Return the observation with these gauges on each node."""
    nodes_ = tuple(replace(node_, **changes) for node_ in observation.nodes)  # type: ignore[arg-type]
    return replace(observation, nodes=nodes_)


CASES = [
    Case(
        reason=ScalingReason.STEADY,
        observation=observed_pool(2, 1, 10.0),
        prefill=2,
        decode=1,
        message="2 needed",
    ),
    Case(
        reason=ScalingReason.DEMAND_ROSE,
        observation=observed_pool(2, 2, 20.0),
        prefill=3,
        decode=2,
        message="prefill 2 -> 3 (DemandRose: 18,000 uncached prompt tokens/s",
    ),
    Case(
        reason=ScalingReason.TREND_ROSE,
        observation=observed_pool(2, 2, 17.0),
        memory=growing(),
        prefill=3,
        decode=2,
        message="predicted in 60 s",
    ),
    Case(
        reason=ScalingReason.BACKLOG_GREW,
        observation=queued(305_000),
        prefill=4,
        decode=2,
        message="tokens would still be queued then",
    ),
    Case(
        reason=ScalingReason.TARGET_MISSED,
        observation=with_nodes(observed_pool(2, 1, demand=demand(10.0, 1, ttft_s=3.5)), busy=0.6),
        prefill=3,
        decode=1,
        message="TTFT 3.50 s exceeds 2 s and the nodes are busy",
    ),
    Case(
        reason=ScalingReason.TARGET_UNREACHABLE,
        observation=observed_pool(
            8, 1, demand=demand(1.0, 1, prompt_tokens=40_000.0, uncached_prompt_tokens=40_000.0)
        ),
        prefill=11,
        decode=1,
        message="a single prompt takes 4.00 s, which exceeds the TTFT target of 2 s",
    ),
    Case(
        reason=ScalingReason.DEMAND_FELL,
        observation=observed_pool(2, 2, 10.0),
        prefill=2,
        decode=1,
        message="decode 2 -> 1",
    ),
    Case(
        reason=ScalingReason.STORE_LIMITED,
        observation=observed_pool(
            2,
            2,
            demand=demand(20.0, store_read_bytes=9e9),
            capability=replace(NODE, store_read_limit=10e9),
        ),
        prefill=2,
        decode=2,
        message="reads from the store are the bottleneck: 9.00 of 10.00 GB/s",
    ),
    Case(
        reason=ScalingReason.CAPACITY_COMING,
        observation=observed_pool(
            3,
            2,
            20.0,
            nodes=(
                *nodes(demand(20.0), 2, 2),
                node("prefill", 2, Phase.STARTING, since_s=12.0),
            ),
        ),
        prefill=3,
        decode=2,
        message="1 starting, the oldest for 12 s",
    ),
    Case(
        reason=ScalingReason.DEMAND_UNKNOWN,
        observation=observed_pool(4, 4, demand=None),
        prefill=4,
        decode=4,
        message="no router has reported its load",
    ),
    Case(
        reason=ScalingReason.DEMAND_STALE,
        observation=observed_pool(4, 4, demand=demand(10.0, 4, age_s=31.0)),
        prefill=4,
        decode=4,
        message="load report is 31 s old, over the limit of 30 s",
    ),
    Case(
        reason=ScalingReason.CAPABILITY_UNKNOWN,
        observation=observed_pool(4, 4, capability=None),
        prefill=4,
        decode=4,
        message="no node has measured its speed yet",
    ),
    Case(
        reason=ScalingReason.NODES_SILENT,
        observation=with_nodes(observed_pool(4, 4, 1.0), age_s=None),
        prefill=4,
        decode=4,
        message="no recent report from prefill-0, prefill-1, prefill-2",
    ),
    Case(
        reason=ScalingReason.AT_MINIMUM,
        observation=observed_pool(3, 3, 1.0),
        policy=bounded((3, 9), (3, 9)),
        prefill=3,
        decode=3,
        message="the minimum is 3",
    ),
    Case(
        reason=ScalingReason.AT_MAXIMUM,
        observation=observed_pool(2, 2, 20.0),
        policy=bounded((1, 2), (1, 2)),
        prefill=2,
        decode=2,
        message="3 needed for TTFT 2 s; the maximum is 2",
    ),
    Case(
        reason=ScalingReason.SCHEDULE_MINIMUM,
        observation=observed_pool(1, 4, 1.0),
        policy=replace(
            POLICY,
            active_schedules=(ScheduledRange(min_replicas={"decode": 4}),),
        ),
        prefill=1,
        decode=4,
        message="the minimum is 4",
    ),
    Case(
        reason=ScalingReason.SCHEDULE_MAXIMUM,
        observation=observed_pool(2, 2, 20.0),
        policy=replace(
            POLICY,
            active_schedules=(ScheduledRange(max_replicas={"prefill": 2}),),
        ),
        prefill=2,
        decode=2,
        message="the maximum is 2",
    ),
    Case(
        reason=ScalingReason.RATIO_RAISED,
        observation=observed_pool(3, 1, 20.0, demand=demand(20.0, 1, answer=10.0)),
        policy=replace(POLICY, ratio_max=1.5),
        prefill=3,
        decode=2,
        message="the ratio of prefill to decode nodes must be 0 to 1.5",
    ),
    Case(
        reason=ScalingReason.RATIO_LIMITED,
        observation=observed_pool(2, 2, 20.0, demand=demand(20.0, 2, answer=10.0)),
        policy=bounded((1, 9), (1, 2), ratio_max=1.0),
        prefill=2,
        decode=2,
        message="the ratio of prefill to decode nodes must be 0 to 1",
    ),
    Case(
        reason=ScalingReason.BUDGET_LIMITED,
        observation=observed_pool(2, 2, demand=demand(20.0, 2, answer=400.0)),
        policy=replace(POLICY, gpu_budget=4),
        prefill=2,
        decode=2,
        message="the budget is 4 GPUs",
    ),
    Case(
        reason=ScalingReason.BUDGET_SHIFT,
        observation=observed_pool(3, 3, demand=demand(10.0, 3, answer=2_000.0)),
        policy=replace(POLICY, gpu_budget=6, down_nodes=2),
        prefill=1,
        decode=3,
        message="the budget is 6 GPUs, and the other role needs nodes more",
    ),
    Case(
        reason=ScalingReason.BUDGET_WAITS,
        observation=observed_pool(
            2, 2, 20.0, nodes=(*nodes(demand(20.0), 2, 2), node("decode", 2, Phase.DRAINING))
        ),
        policy=replace(POLICY, gpu_budget=5),
        prefill=2,
        decode=2,
        message="removed nodes still hold the GPUs",
    ),
    Case(
        reason=ScalingReason.BUDGET_TOO_SMALL,
        observation=observed_pool(2, 2, 10.0),
        policy=bounded((2, 9), (3, 9), gpu_budget=4),
        prefill=2,
        decode=2,
        message="the minimums need more than the budget of 4 GPUs",
    ),
    Case(
        reason=ScalingReason.UP_STABILISING,
        observation=observed_pool(2, 2, 20.0),
        policy=replace(POLICY, up_stabilization_s=60.0),
        memory=memory_of_needs(2, 2),
        prefill=2,
        decode=2,
        message="fewer were needed within the last 60 s",
    ),
    Case(
        reason=ScalingReason.UP_STEP,
        observation=observed_pool(2, 2, 80.0),
        prefill=4,
        decode=4,
        message="at most 4 nodes in this step",
    ),
    Case(
        reason=ScalingReason.DOWN_STABILISING,
        observation=observed_pool(2, 4, 10.0),
        memory=memory_of_needs(2, 4),
        prefill=2,
        decode=4,
        message="4 were needed within the last 300 s",
    ),
    Case(
        reason=ScalingReason.DOWN_STEP,
        observation=observed_pool(2, 5, 10.0),
        prefill=2,
        decode=4,
        message="at most 1 removed at once",
    ),
    Case(
        reason=ScalingReason.CONSOLIDATION_REFUSED,
        observation=with_nodes(
            observed_pool(2, 2, demand=demand(10.0, 2, itl_s=0.06)), since_s=10.0
        ),
        prefill=2,
        decode=2,
        message="ITL 60 ms exceeds 50 ms",
    ),
    Case(
        reason=ScalingReason.DRAIN_RUNNING,
        observation=observed_pool(
            2, 3, 10.0, nodes=(*nodes(demand(10.0, 3), 2, 3), node("decode", 3, Phase.DRAINING))
        ),
        prefill=2,
        decode=3,
        message="decode-3 still draining",
    ),
    Case(
        reason=ScalingReason.ROLL_OUT_RUNNING,
        observation=observed_pool(2, 3, 10.0, rolling=True),
        prefill=2,
        decode=3,
        message="a roll-out is in progress",
    ),
    Case(
        reason=ScalingReason.IDLE,
        observation=observed_pool(3, 3, 0.0),
        policy=ZERO,
        prefill=0,
        decode=0,
        message="no request for 1000 s, over 300 s",
    ),
    Case(
        reason=ScalingReason.ASLEEP,
        observation=observed_pool(0, 0, 0.0),
        policy=ZERO,
        prefill=0,
        decode=0,
        message="is scaled to zero until a request arrives",
    ),
    Case(
        reason=ScalingReason.NODES_ASLEEP,
        observation=with_nodes(observed_pool(1, 1, 0.0), asleep=True),
        prefill=1,
        decode=1,
        message="idle for 1000 s: asleep; prefill 1 (AtMinimum",
    ),
    Case(
        reason=ScalingReason.WOKEN,
        observation=observed_pool(0, 0, demand=demand(0.0, held=1, idle_s=0.0)),
        policy=replace(ZERO, ranges=bounded((2, 9), (1, 9)).ranges),
        prefill=2,
        decode=1,
        message="prefill 0 -> 2",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.reason))
def test_a_case_has_its_counts_reason_and_message(case: Case) -> None:
    decision, _ = plan_replicas(case.observation, case.policy, case.memory)
    assert (decision.prefill, decision.decode) == (case.prefill, case.decode)
    assert decision.reason == case.reason
    assert case.message in decision.message
    current = case.observation.current_replicas
    assert decision.numbers["prefill_desired"] == current["prefill"]


def test_every_reason_has_a_case() -> None:
    assert [case.reason for case in CASES] == list(ScalingReason)


@pytest.mark.parametrize("word", [*ScalingReason, *StepFallback], ids=str)
def test_every_word_has_a_meaning_and_a_remedy_of_one_line(
    word: ScalingReason | StepFallback,
) -> None:
    assert re.fullmatch(r"([A-Z][a-z]+)+", word)
    for text in (word.meaning, word.remedy):
        assert text
        assert "\n" not in text
        assert "|" not in text


@pytest.mark.parametrize("table", [reasons_table(), fallbacks_table()], ids=["reasons", "steps"])
def test_the_tables_in_the_docs_are_the_generated_ones(table: str) -> None:
    section = re.search(
        r"^## Why the pool has as many nodes as it has\n(.*?)(?=^## |\Z)",
        PAGE,
        re.MULTILINE | re.DOTALL,
    )
    assert section is not None
    assert table in section[1], (
        "regenerate them: python -m baton_operator.autoscaling.planner.reasons"
    )


def test_the_default_memory_equals_that_of_a_running_operator() -> None:
    memory = PlannerMemory()
    for back in range(240, 0, -1):
        observation = observed_pool(1, 1, 1.0, at_s=NOW - 15.0 * back)
        _, memory = plan_replicas(observation, POLICY, memory)
    assert memory.since_s == memory_of_needs().since_s
    past = PastRecommendation(at_s=NOW - 15.0, prefill=1, decode=1)
    assert past in memory.recommendations
