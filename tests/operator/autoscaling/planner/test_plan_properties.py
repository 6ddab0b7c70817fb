"""Invariants of every decision: bounds, budget, ratio, monotonicity, and unknown is not zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton_operator.autoscaling.planner.inputs import (
    AutoscalingPolicy,
    Capability,
    Demand,
    ObservedNode,
    Phase,
    PoolObservation,
    ReplicaRange,
    ScheduledRange,
)
from baton_operator.autoscaling.planner.memory import PastRecommendation, PlannerMemory, TargetMiss
from baton_operator.autoscaling.planner.plan import Decision, plan_replicas
from baton_operator.autoscaling.planner.replica_limits import ranges_now
from baton_operator.autoscaling.policy import find_contradictions
from baton_protocol.store import ROLES, Role
from tests.support.planner.builders import NOW, nodes

COUNTS = st.integers(0, 6)
RATES = st.integers(0, 60_000)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


DEMANDS = st.builds(
    Demand,
    window_s=st.just(30.0),
    age_s=st.sampled_from([0.0, 5.0, 29.0, 31.0]),
    requests=maybe(st.integers(0, 60)),
    prompt_tokens=maybe(RATES),
    uncached_prompt_tokens=maybe(RATES),
    output_tokens=maybe(RATES),
    live_requests=maybe(st.integers(0, 1_000)),
    live_kv_tokens=maybe(st.integers(0, 2_000_000)),
    held=maybe(st.integers(0, 5)),
    idle_s=maybe(st.sampled_from([0.0, 100.0, 1_000.0])),
    store_read_bytes=maybe(st.sampled_from([0.0, 5e9, 1e10])),
    ttft_s=maybe(st.sampled_from([0.1, 5.0])),
    itl_s=maybe(st.sampled_from([0.01, 0.2])),
)
NODES = st.builds(
    ObservedNode,
    name=st.just("node"),
    role=st.sampled_from(ROLES),
    phase=st.sampled_from(Phase),
    since_s=st.sampled_from([0.0, 30.0, 1_000.0]),
    age_s=maybe(st.sampled_from([1.0, 31.0])),
    queued_tokens=maybe(st.integers(0, 100_000)),
    running=maybe(st.integers(0, 300)),
    waiting=maybe(st.integers(0, 10)),
    kv_tokens=maybe(st.integers(0, 400_000)),
    busy=maybe(st.floats(0.0, 1.0)),
)
CAPABILITIES = st.builds(
    Capability,
    prefill_tokens=st.sampled_from([100.0, 5_000.0, 40_000.0]),
    step_base_s=st.sampled_from([0.005, 0.04, 0.2]),
    step_per_seq_s=st.sampled_from([0.0, 1e-4]),
    step_per_kv_token_s=st.sampled_from([0.0, 1e-7]),
    kv_capacity=maybe(st.sampled_from([10_000, 400_000])),
    store_read_limit=maybe(st.just(1e10)),
)


@st.composite
def policies(draw: st.DrawFn) -> AutoscalingPolicy:
    ranges: dict[Role, ReplicaRange] = {}
    for role in ROLES:
        least = draw(st.integers(0 if role == "prefill" else 1, 3))
        most = draw(st.integers(max(1, least), 8))
        ranges[role] = ReplicaRange(
            min_replicas=least, max_replicas=most, gpus=draw(st.integers(0, 2))
        )
    ratio = sorted(draw(st.tuples(*[st.sampled_from([0.25, 0.5, 1.0, 2.0, 3.0])] * 2)))
    schedule = ScheduledRange(
        min_replicas={draw(st.sampled_from(ROLES)): draw(st.integers(0, 4))},
        max_replicas={draw(st.sampled_from(ROLES)): draw(st.integers(1, 4))},
    )
    policy = AutoscalingPolicy(
        ranges=ranges,
        gpu_budget=draw(maybe(st.integers(0, 16))),
        ratio_min=draw(maybe(st.just(ratio[0]))),
        ratio_max=draw(maybe(st.just(ratio[1]))),
        scale_to_zero_after_s=draw(maybe(st.just(300.0))),
        up_stabilization_s=draw(st.sampled_from([0.0, 60.0])),
        down_stabilization_s=draw(st.sampled_from([0.0, 300.0])),
        up_factor=draw(st.sampled_from([1.0, 2.0, 10.0])),
        down_nodes=draw(st.integers(1, 3)),
        active_schedules=draw(st.sampled_from([(), (schedule,)])),
    )
    assume(not find_contradictions(policy))
    return policy


MEMORIES = st.builds(
    PlannerMemory,
    since_s=st.sampled_from([NOW - 5_000.0, NOW - 100.0, NOW]),
    recommendations=st.lists(
        st.builds(
            PastRecommendation,
            at_s=st.sampled_from([NOW - 400.0, NOW - 50.0, NOW - 5.0]),
            prefill=COUNTS,
            decode=COUNTS,
        ),
        max_size=4,
    ).map(tuple),
    misses=st.lists(
        st.builds(
            TargetMiss, at_s=st.just(NOW - 60.0), role=st.sampled_from(ROLES), load=st.just(5_000.0)
        ),
        max_size=1,
    ).map(tuple),
)
OBSERVATIONS = st.builds(
    PoolObservation,
    at_s=st.just(NOW),
    nodes=st.lists(NODES, max_size=8).map(tuple),
    current_replicas=st.fixed_dictionaries({"prefill": COUNTS, "decode": COUNTS}),
    demand=maybe(DEMANDS),
    capability=maybe(CAPABILITIES),
    rolling=st.booleans(),
)
examples = settings(max_examples=150)


def count(observation: PoolObservation, role: Role, *phases: Phase) -> int:
    return sum(1 for node in observation.nodes if node.role == role and node.phase in phases)


def existing(observation: PoolObservation, role: Role) -> int:
    alive = count(observation, role, Phase.PENDING, Phase.STARTING, Phase.READY)
    return max(observation.current_replicas[role], alive)


def count_of(decision: Decision, role: Role) -> int:
    return decision.prefill if role == "prefill" else decision.decode


def gpus(policy: AutoscalingPolicy, pair: dict[Role, int]) -> int:
    return sum(policy.ranges[role].gpus * number for role, number in pair.items())


def in_ratio(policy: AutoscalingPolicy, prefill: int, decode: int) -> bool:
    low, high = policy.ratio_min, policy.ratio_max
    return (low is None or prefill >= low * decode - 1e-6) and (
        high is None or prefill <= high * decode + 1e-6
    )


@examples
@given(OBSERVATIONS, policies(), MEMORIES)
def test_bounds_and_budget_always_hold_and_the_decision_says_why(
    observation: PoolObservation, policy: AutoscalingPolicy, memory: PlannerMemory
) -> None:
    decision, _ = plan_replicas(observation, policy, memory)
    bounds = ranges_now(policy)
    decided: dict[Role, int] = {"prefill": decision.prefill, "decode": decision.decode}
    held = {
        role: max(decided[role], existing(observation, role))
        + count(observation, role, Phase.DRAINING)
        for role in ROLES
    }
    grows = any(
        decided[role] > existing(observation, role) and policy.ranges[role].gpus for role in ROLES
    )
    if policy.gpu_budget is not None:
        assert gpus(policy, decided) <= policy.gpu_budget
        assert not grows or gpus(policy, held) <= policy.gpu_budget
    for role in ROLES:
        assert decided[role] <= bounds[role].max_replicas
    asleep = policy.scale_to_zero_after_s is not None and decision.prefill == decision.decode == 0
    if policy.gpu_budget is None and not asleep:
        assert all(decided[role] >= bounds[role].min_replicas for role in ROLES)
    assert all(f"{role} " in decision.message or asleep for role in ROLES)
    assert all(number == number for number in decision.numbers.values())


@examples
@given(OBSERVATIONS, policies(), MEMORIES)
def test_a_pair_within_the_ratio_is_followed_by_another(
    observation: PoolObservation, policy: AutoscalingPolicy, memory: PlannerMemory
) -> None:
    bounds = ranges_now(policy)
    inside = {role: bounds[role].clamp(observation.current_replicas[role]) for role in ROLES}
    assume(policy.gpu_budget is None or gpus(policy, inside) <= policy.gpu_budget)
    assume(in_ratio(policy, inside["prefill"], inside["decode"]))
    observation = replace(observation, current_replicas=inside)
    decision, _ = plan_replicas(observation, policy, memory)
    assert in_ratio(policy, decision.prefill, decision.decode)


@given(
    st.integers(0, 60),
    st.integers(10, 2_000),
    st.integers(1, 8),
    st.integers(1, 8),
    policies(),
)
def test_the_ratio_is_reached_if_bounds_and_budget_allow_it(
    requests: int, answer: int, prefill: int, decode: int, policy: AutoscalingPolicy
) -> None:
    policy = replace(
        policy, scale_to_zero_after_s=None, down_stabilization_s=0.0, up_stabilization_s=0.0
    )
    bounds = ranges_now(policy)
    possible = any(
        in_ratio(policy, prefill_count, decode_count)
        and (
            policy.gpu_budget is None
            or gpus(policy, {"prefill": prefill_count, "decode": decode_count}) <= policy.gpu_budget
        )
        for prefill_count in range(
            bounds["prefill"].min_replicas, bounds["prefill"].max_replicas + 1
        )
        for decode_count in range(bounds["decode"].min_replicas, bounds["decode"].max_replicas + 1)
    )
    memory = PlannerMemory()
    for turn in range(40):
        observation = steady(requests, answer, prefill, decode, NOW + 15.0 * turn)
        decision, memory = plan_replicas(observation, policy, memory)
        prefill, decode = decision.prefill, decision.decode
    assert in_ratio(policy, prefill, decode) or not possible


def steady(
    requests: int, answer: int, prefill: int, decode: int, at_s: float = NOW, factor: int = 1
) -> PoolObservation:
    """A pool without unknown values. `factor` multiplies the demand, but not the nodes' gauges."""
    demand = Demand(
        window_s=30.0,
        age_s=0.0,
        requests=requests * factor,
        prompt_tokens=900 * requests * factor,
        uncached_prompt_tokens=900 * requests * factor,
        output_tokens=answer * requests * factor,
        live_requests=requests * factor,
        live_kv_tokens=1_000 * requests * factor,
        held=0,
        idle_s=0.0,
        ttft_s=0.2,
        itl_s=0.02,
    )
    calm = replace(demand, live_requests=requests, live_kv_tokens=1_000 * requests)
    return PoolObservation(
        at_s=at_s,
        nodes=nodes(calm, prefill, decode),
        current_replicas={"prefill": prefill, "decode": decode},
        demand=demand,
        capability=Capability(
            prefill_tokens=10_000.0,
            step_base_s=0.01,
            step_per_seq_s=1e-4,
            step_per_kv_token_s=1e-7,
            kv_capacity=400_000,
        ),
    )


@examples
@given(
    st.integers(0, 40),
    st.integers(1, 1_000),
    COUNTS,
    st.integers(1, 6),
    st.integers(1, 5),
    policies(),
    MEMORIES,
)
def test_more_demand_never_gives_a_role_fewer_nodes(
    requests: int,
    answer: int,
    prefill: int,
    decode: int,
    factor: int,
    policy: AutoscalingPolicy,
    memory: PlannerMemory,
) -> None:
    """Without a budget or a ratio: with them, one role's need limits the other role."""
    policy = replace(policy, gpu_budget=None, ratio_min=None, ratio_max=None)
    less, _ = plan_replicas(steady(requests, answer, prefill, decode), policy, memory)
    more, _ = plan_replicas(
        steady(requests, answer, prefill, decode, factor=factor), policy, memory
    )
    assert more.prefill >= less.prefill
    assert more.decode >= less.decode


@examples
@given(OBSERVATIONS, policies(), MEMORIES, st.data())
def test_unknown_inputs_never_scale_down(
    observation: PoolObservation,
    policy: AutoscalingPolicy,
    memory: PlannerMemory,
    data: st.DataObject,
) -> None:
    """Only the owner's maximum may still do so."""
    policy = replace(policy, gpu_budget=None, ratio_min=None, ratio_max=None)
    hidden = data.draw(st.sampled_from(["demand", "age", "capability", "prompt", "live", "nodes"]))
    demand = observation.demand
    roles: tuple[Role, ...] = ROLES
    if hidden == "demand":
        observation = replace(observation, demand=None)
    elif hidden == "capability":
        observation = replace(observation, capability=None)
        demand = None  # a pool may go to sleep without knowing how fast its nodes are
        policy = replace(policy, scale_to_zero_after_s=None)
    elif hidden == "nodes":
        assume(all(count(observation, role, Phase.READY) for role in ROLES))
        policy = replace(policy, scale_to_zero_after_s=None)
        observation = replace(
            observation, nodes=tuple(replace(node, age_s=None) for node in observation.nodes)
        )
    elif demand is not None:
        change: dict[str, Any] = {"age_s": 31.0}
        if hidden == "prompt":
            change, roles = {"uncached_prompt_tokens": None, "idle_s": None}, ("prefill",)
        elif hidden == "live":
            change, roles = {"output_tokens": None, "idle_s": None}, ("decode",)
        observation = replace(observation, demand=replace(demand, **change))
    decision, _ = plan_replicas(observation, policy, memory)
    bounds = ranges_now(policy)
    for role in roles:
        assert count_of(decision, role) >= min(
            observation.current_replicas[role], bounds[role].max_replicas
        )


@examples
@given(OBSERVATIONS, policies(), MEMORIES)
def test_a_second_decision_at_the_same_time_is_identical(
    observation: PoolObservation, policy: AutoscalingPolicy, memory: PlannerMemory
) -> None:
    decision, after = plan_replicas(observation, policy, memory)
    assert plan_replicas(observation, policy, memory) == (decision, after)
    assert plan_replicas(observation, policy, after) == (decision, after)
