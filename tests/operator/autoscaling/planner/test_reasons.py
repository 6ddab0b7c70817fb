"""One situation per reason, with the counts and the message; and the table of reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import pytest

from baton_operator.autoscaling.planner.decision.plan import plan
from baton_operator.autoscaling.planner.memory import DemandSample, Memory, WantedNodes
from baton_operator.autoscaling.planner.reasons import REASONS
from baton_operator.autoscaling.planner.records import Phase, Policy, Reason, Schedule, Situation
from tests.support.planner.looks import (
    NODE,
    NOW,
    POLICY,
    bounded,
    demand,
    look,
    node,
    nodes,
    watched,
)

ALWAYS = frozenset(range(7))
ZERO = replace(POLICY, scale_to_zero_after_s=300.0)


@dataclass(frozen=True, kw_only=True)
class Case:
    reason: Reason
    look: Situation
    prefill: int
    decode: int
    message: str  # a part of the decision's message
    policy: Policy = POLICY
    memory: Memory = field(default_factory=watched)


def growing() -> Memory:
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
    return replace(watched(), seen=seen)


def queued(tokens: int) -> Situation:
    """Return a situation whose demand needs exactly its three prefill nodes, each with a queue."""
    calm = look(3, 2, 20.0)
    filled = tuple(
        replace(one, queued_tokens=tokens) if one.role == "prefill" else one for one in calm.nodes
    )
    return replace(calm, nodes=filled)


def with_nodes(situation: Situation, **changes: object) -> Situation:
    """Return the situation with these gauges on each node."""
    nodes_ = tuple(replace(one, **changes) for one in situation.nodes)  # type: ignore[arg-type]
    return replace(situation, nodes=nodes_)


CASES = [
    Case(reason=Reason.STEADY, look=look(2, 1, 10.0), prefill=2, decode=1, message="2 needed"),
    Case(
        reason=Reason.DEMAND_ROSE,
        look=look(2, 2, 20.0),
        prefill=3,
        decode=2,
        message="prefill 2 -> 3 (DemandRose: 18,000 uncached prompt tokens/s",
    ),
    Case(
        reason=Reason.TREND_ROSE,
        look=look(2, 2, 17.0),
        memory=growing(),
        prefill=3,
        decode=2,
        message="predicted in 60 s",
    ),
    Case(
        reason=Reason.BACKLOG_GREW,
        look=queued(305_000),
        prefill=4,
        decode=2,
        message="tokens would still be queued then",
    ),
    Case(
        reason=Reason.TARGET_MISSED,
        look=with_nodes(look(2, 1, demand=demand(10.0, 1, ttft_s=3.5)), busy=0.6),
        prefill=3,
        decode=1,
        message="TTFT 3.50 s exceeds 2 s and the nodes are busy",
    ),
    Case(
        reason=Reason.TARGET_UNREACHABLE,
        look=look(
            8, 1, demand=demand(1.0, 1, prompt_tokens=40_000.0, uncached_prompt_tokens=40_000.0)
        ),
        prefill=11,
        decode=1,
        message="a single prompt takes 4.00 s, which exceeds the TTFT target of 2 s",
    ),
    Case(
        reason=Reason.DEMAND_FELL,
        look=look(2, 2, 10.0),
        prefill=2,
        decode=1,
        message="decode 2 -> 1",
    ),
    Case(
        reason=Reason.STORE_LIMITED,
        look=look(
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
        reason=Reason.CAPACITY_COMING,
        look=look(
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
        reason=Reason.DEMAND_UNKNOWN,
        look=look(4, 4, demand=None),
        prefill=4,
        decode=4,
        message="no router has reported its load",
    ),
    Case(
        reason=Reason.DEMAND_STALE,
        look=look(4, 4, demand=demand(10.0, 4, age_s=31.0)),
        prefill=4,
        decode=4,
        message="load report is 31 s old, over the limit of 30 s",
    ),
    Case(
        reason=Reason.CAPABILITY_UNKNOWN,
        look=look(4, 4, capability=None),
        prefill=4,
        decode=4,
        message="no node has measured its speed yet",
    ),
    Case(
        reason=Reason.NODES_SILENT,
        look=with_nodes(look(4, 4, 1.0), age_s=None),
        prefill=4,
        decode=4,
        message="no recent report from prefill-0, prefill-1, prefill-2",
    ),
    Case(
        reason=Reason.AT_MINIMUM,
        look=look(3, 3, 1.0),
        policy=bounded((3, 9), (3, 9)),
        prefill=3,
        decode=3,
        message="the minimum is 3",
    ),
    Case(
        reason=Reason.AT_MAXIMUM,
        look=look(2, 2, 20.0),
        policy=bounded((1, 2), (1, 2)),
        prefill=2,
        decode=2,
        message="3 needed for TTFT 2 s; the maximum is 2",
    ),
    Case(
        reason=Reason.SCHEDULE_MINIMUM,
        look=look(1, 4, 1.0),
        policy=replace(
            POLICY,
            schedules=(
                Schedule(days=ALWAYS, from_minute=0, to_minute=1440, minimum={"decode": 4}),
            ),
        ),
        prefill=1,
        decode=4,
        message="the minimum is 4",
    ),
    Case(
        reason=Reason.SCHEDULE_MAXIMUM,
        look=look(2, 2, 20.0),
        policy=replace(
            POLICY,
            schedules=(
                Schedule(days=ALWAYS, from_minute=0, to_minute=1440, maximum={"prefill": 2}),
            ),
        ),
        prefill=2,
        decode=2,
        message="the maximum is 2",
    ),
    Case(
        reason=Reason.RATIO_RAISED,
        look=look(3, 1, 20.0, demand=demand(20.0, 1, answer=10.0)),
        policy=replace(POLICY, ratio_max=1.5),
        prefill=3,
        decode=2,
        message="the ratio of prefill to decode nodes must be 0 to 1.5",
    ),
    Case(
        reason=Reason.RATIO_LIMITED,
        look=look(2, 2, 20.0, demand=demand(20.0, 2, answer=10.0)),
        policy=bounded((1, 9), (1, 2), ratio_max=1.0),
        prefill=2,
        decode=2,
        message="the ratio of prefill to decode nodes must be 0 to 1",
    ),
    Case(
        reason=Reason.BUDGET_LIMITED,
        look=look(2, 2, demand=demand(20.0, 2, answer=400.0)),
        policy=replace(POLICY, gpu_budget=4),
        prefill=2,
        decode=2,
        message="the budget is 4 GPUs",
    ),
    Case(
        reason=Reason.BUDGET_SHIFT,
        look=look(3, 3, demand=demand(10.0, 3, answer=2_000.0)),
        policy=replace(POLICY, gpu_budget=6, down_step=2),
        prefill=1,
        decode=3,
        message="the budget is 6 GPUs, and the other role needs nodes more",
    ),
    Case(
        reason=Reason.BUDGET_WAITS,
        look=look(
            2, 2, 20.0, nodes=(*nodes(demand(20.0), 2, 2), node("decode", 2, Phase.DRAINING))
        ),
        policy=replace(POLICY, gpu_budget=5),
        prefill=2,
        decode=2,
        message="removed nodes still hold the GPUs",
    ),
    Case(
        reason=Reason.BUDGET_TOO_SMALL,
        look=look(2, 2, 10.0),
        policy=bounded((2, 9), (3, 9), gpu_budget=4),
        prefill=2,
        decode=2,
        message="the minimums need more than the budget of 4 GPUs",
    ),
    Case(
        reason=Reason.UP_STABILISING,
        look=look(2, 2, 20.0),
        policy=replace(POLICY, up_stabilisation_s=60.0),
        memory=watched(2, 2),
        prefill=2,
        decode=2,
        message="fewer were needed within the last 60 s",
    ),
    Case(
        reason=Reason.UP_STEP,
        look=look(2, 2, 80.0),
        prefill=4,
        decode=4,
        message="at most 4 nodes in this step",
    ),
    Case(
        reason=Reason.DOWN_STABILISING,
        look=look(2, 4, 10.0),
        memory=watched(2, 4),
        prefill=2,
        decode=4,
        message="4 were needed within the last 300 s",
    ),
    Case(
        reason=Reason.DOWN_STEP,
        look=look(2, 5, 10.0),
        prefill=2,
        decode=4,
        message="at most 1 removed at once",
    ),
    Case(
        reason=Reason.CONSOLIDATION_REFUSED,
        look=with_nodes(look(2, 2, demand=demand(10.0, 2, itl_s=0.06)), since_s=10.0),
        prefill=2,
        decode=2,
        message="ITL 60 ms exceeds 50 ms",
    ),
    Case(
        reason=Reason.DRAIN_RUNNING,
        look=look(
            2, 3, 10.0, nodes=(*nodes(demand(10.0, 3), 2, 3), node("decode", 3, Phase.DRAINING))
        ),
        prefill=2,
        decode=3,
        message="decode-3 still draining",
    ),
    Case(
        reason=Reason.ROLL_OUT_RUNNING,
        look=look(2, 3, 10.0, rolling=True),
        prefill=2,
        decode=3,
        message="a roll-out is in progress",
    ),
    Case(
        reason=Reason.IDLE,
        look=look(3, 3, 0.0),
        policy=ZERO,
        prefill=0,
        decode=0,
        message="no request for 1000 s, over 300 s",
    ),
    Case(
        reason=Reason.ASLEEP,
        look=look(0, 0, 0.0),
        policy=ZERO,
        prefill=0,
        decode=0,
        message="is scaled to zero until a request arrives",
    ),
    Case(
        reason=Reason.WOKEN,
        look=look(0, 0, demand=demand(0.0, held=1, idle_s=0.0)),
        policy=replace(ZERO, bounds=bounded((2, 9), (1, 9)).bounds),
        prefill=2,
        decode=1,
        message="prefill 0 -> 2",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.reason))
def test_a_situation_gives_its_counts_reason_and_message(case: Case) -> None:
    found, _ = plan(case.look, case.policy, case.memory)
    assert (found.prefill, found.decode, found.reason) == (case.prefill, case.decode, case.reason)
    assert case.message in found.message
    assert found.numbers["prefill_desired"] == case.look.desired["prefill"]
    changes = (found.prefill, found.decode) != tuple(case.look.desired.values())
    assert found.acts == changes


def test_every_reason_has_a_case() -> None:
    assert [case.reason for case in CASES] == list(Reason)


def test_every_reason_has_a_meaning_and_a_remedy_of_one_line() -> None:
    assert list(REASONS) == list(Reason)
    for reason, explained in REASONS.items():
        assert re.fullmatch(r"([A-Z][a-z]+)+", reason)
        for text in (explained.meaning, explained.remedy):
            assert text
            assert "\n" not in text
            assert "|" not in text


def test_the_default_memory_equals_that_of_a_running_operator() -> None:
    memory = Memory()
    for back in range(240, 0, -1):
        _, memory = plan(replace(look(1, 1, 1.0), at_s=NOW - 15.0 * back), POLICY, memory)
    assert memory.since_s == watched().since_s
    assert WantedNodes(at_s=NOW - 15.0, prefill=1, decode=1) in memory.needed
