"""The planner's nodes, and samples to learn from, from pods and reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.autoscaling import node_metrics
from baton_operator.autoscaling.node_metrics import BATCH, Gauge
from baton_operator.autoscaling.node_views import Starts, nodes_of
from baton_operator.autoscaling.planner.capability.learn import NodeSample
from baton_operator.autoscaling.planner.records import NodeView, Phase
from baton_operator.state.observed import FirstSeen, ObservedPod, read_pod
from baton_protocol.ids import Epoch
from baton_protocol.store import NodeLoad, NodeReport, Role, Speeds
from tests.support.kubernetes import pod_bodies as b
from tests.support.nodes.fake_node import LAYOUT, make_report
from tests.support.planner.observations import pod, stamp

SPEEDS = Speeds(prefill_tokens_per_s=1000.0, decode_step_ms=20.0)
ONE: dict[Role, int] = {"prefill": 1, "decode": 1}


def report(name: str = "d", role: Role = "decode", **load: Any) -> NodeReport:
    return make_report(name, role, speeds=SPEEDS, load=NodeLoad(total_blocks=100, **load))


def views(
    *pods: ObservedPod,
    known: node_metrics.Gauges | None = None,
    desired: dict[Role, int] | None = None,
    rolling: bool = False,
) -> dict[str, NodeView]:
    found = nodes_of(
        pods,
        known or {},
        desired or {"prefill": 9, "decode": 9},
        rolling=rolling,
        now_s=50.0,
    )
    return {view.name: view for view in found}


PHASES: list[tuple[dict[str, Any], Phase]] = [
    ({}, Phase.READY),
    ({"ready": False}, Phase.STARTING),
    ({"ready": False, "stage": "pending"}, Phase.STARTING),
    ({"ready": False, "stage": "unplaced"}, Phase.PENDING),
    ({"drain_since": stamp(-9)}, Phase.DRAINING),
    ({"terminating": True}, Phase.DRAINING),
]


@pytest.mark.parametrize(("changes", "phase"), PHASES)
def test_a_pods_phase_is_what_the_cluster_says(changes: dict[str, Any], phase: Phase) -> None:
    [view] = views(pod("decode", **changes)).values()
    assert (view.phase, view.role) == (phase, "decode")


def test_pods_that_are_over_and_pods_of_others_are_no_nodes() -> None:
    assert views(pod("decode", stage="over"), pod("router"), pod("kv-data")) == {}


def test_a_node_that_was_drained_by_hand_takes_nothing_new() -> None:
    one = pod("decode")
    drained = msgspec.structs.replace(report(one.name), state="draining")
    assert views(one, known={one.name: Gauge(50.0, drained)})[one.name].phase == Phase.DRAINING


def test_gauges_are_those_of_the_newest_report_and_as_old_as_it() -> None:
    one = pod("decode")
    told = report(one.name, queued_tokens=7, running=3, waiting=2, free_blocks=60)
    view = views(one, known={one.name: Gauge(38.0, told, 0.5)})[one.name]
    assert (view.age_s, view.queued_tokens, view.running, view.waiting) == (12.0, 7, 3, 2)
    assert (view.kv_tokens, view.kv_capacity) == (40 * LAYOUT.block_size, 100 * LAYOUT.block_size)
    assert view.busy == 0.5


def test_a_node_without_a_report_says_nothing_and_not_zero() -> None:
    [view] = views(pod("decode")).values()
    assert (view.age_s, view.running, view.busy, view.kv_tokens) == (None, None, None, None)


def test_a_phase_has_lasted_since_it_was_first_seen_whatever_the_clusters_clocks_say() -> None:
    hour_ahead = stamp(3600)
    seen = FirstSeen(created=5.0, readiness=10.0, drain=45.0)
    ready = pod("decode", 0, ready_since=hour_ahead, seen=seen)
    starting = pod("decode", 1, ready=False, unready_since=hour_ahead, seen=seen)
    draining = pod("decode", 2, drain_since=hour_ahead, ready_since=hour_ahead, seen=seen)
    found = views(ready, starting, draining)
    assert [view.since_s for view in found.values()] == [40.0, 45.0, 5.0]


def test_those_too_many_count_as_going_the_unready_first() -> None:
    pods = [pod("decode", 0), pod("decode", 1), pod("decode", 2, ready=False)]
    phases = [view.phase for view in views(*pods, desired={"prefill": 0, "decode": 1}).values()]
    assert phases == [Phase.DRAINING, Phase.READY, Phase.DRAINING]
    marked = [pod("decode", 0, drain_since=stamp(-1)), pod("decode", 1)]
    assert [view.phase for view in views(*marked, desired=ONE).values()] == [
        Phase.DRAINING,
        Phase.READY,
    ]


def test_in_a_roll_out_no_node_is_surplus() -> None:
    pods = [pod("decode", 0), pod("decode", 1, revision="old")]
    assert {view.phase for view in views(*pods, desired=ONE, rolling=True).values()} == {
        Phase.READY
    }


def test_a_start_lasts_from_the_pods_creation_to_its_readiness_and_is_told_once() -> None:
    starts = Starts()
    assert starts.ended([pod("decode", ready=False, seen=FirstSeen(created=10.0))]) == []
    ready = pod("decode", seen=FirstSeen(created=10.0, readiness=70.0))
    assert starts.ended([ready]) == [60.0]
    assert starts.ended([ready]) == []


@pytest.mark.parametrize(
    ("problem", "known"),
    [("", True), ("NodeLost", True), ("NodeLost", False)],
    ids=["not ready", "its node is silent", "its node is silent, to a new operator"],
)
def test_a_node_that_was_away_for_a_moment_did_not_start_anew(problem: str, known: bool) -> None:
    """Else the operator would learn that a start takes a day."""
    starts = Starts()
    served = pod("decode", seen=FirstSeen(created=0.0, readiness=50.0))
    away = pod(
        "decode", ready=False, problem=problem, seen=FirstSeen(created=0.0, readiness=86_000.0)
    )
    back = pod("decode", seen=FirstSeen(created=0.0, readiness=86_400.0))
    if known:
        assert starts.ended([served]) == []
    assert starts.ended([away]) == []
    assert starts.ended([back]) == []


def test_the_clusters_stamps_are_read_from_the_pod() -> None:
    body = b.pod(b.container(b.RUNNING, ready=True))
    conditions = body["status"].setdefault("conditions", [])
    conditions[:] = [one for one in conditions if one["type"] != "Ready"]
    conditions.append({"type": "Ready", "status": "True", "lastTransitionTime": stamp(-10)})
    found = read_pod(body)
    assert found.ready_since == stamp(-10)
    conditions[-1]["status"] = "False"
    assert read_pod(body).ready_since == ""


def test_a_silent_node_keeps_its_last_gauges() -> None:
    first = node_metrics.heard({}, [report("a"), report("b")], 10.0)
    then = node_metrics.heard(first, [report("b", running=4)], 15.0)
    assert (then["a"].at_s, then["b"].at_s) == (10.0, 15.0)
    assert then["b"].report.load.running == 4


def heard_twice(role: Role, before: dict[str, int], after: dict[str, int]) -> dict[str, Gauge]:
    first = node_metrics.heard({}, [report("n", role, **before)], 10.0)
    return node_metrics.heard(first, [report("n", role, **after)], 15.0)


def test_how_busy_a_node_was_follows_from_its_counters_and_its_speeds() -> None:
    prompts = heard_twice("prefill", {}, {"computed_prompt_tokens_total": 2500})
    assert prompts["n"].busy == 0.5
    steps = heard_twice("decode", {}, {"engine_steps_total": 50})
    assert steps["n"].busy == pytest.approx(0.2)
    assert heard_twice("decode", {}, {"engine_steps_total": 5000})["n"].busy == 1.0
    assert heard_twice("decode", {}, {})["n"].busy == 0.0
    assert node_metrics.heard({}, [report("n")], 10.0)["n"].busy is None


def test_what_is_read_of_the_store_is_known_of_nodes_that_were_heard_twice() -> None:
    twice = heard_twice("prefill", {"fetched_bytes_total": 500}, {"fetched_bytes_total": 2500})
    assert node_metrics.store_read(twice) == 400.0
    assert node_metrics.store_read(node_metrics.heard(twice, [report("m")], 15.0)) == 400.0
    assert node_metrics.store_read(node_metrics.heard({}, [report("m")], 15.0)) is None


def test_another_start_of_a_node_is_not_compared_with_the_one_before() -> None:
    first = node_metrics.heard({}, [report("n", engine_steps_total=900)], 10.0)
    anew = msgspec.structs.replace(report("n"), epoch=Epoch("epoch-2"))
    then = node_metrics.heard(first, [anew], 15.0)
    assert then["n"].busy is None
    assert node_metrics.samples(first, then) == []


def test_a_step_is_learnt_from_only_while_a_batch_goes_on() -> None:
    first = node_metrics.heard({}, [report("n", running=4, free_blocks=80)], 10.0)
    told = report("n", running=6, free_blocks=60, engine_steps_total=100)
    [sample] = node_metrics.samples(first, node_metrics.heard(first, [told], 15.0))
    assert (sample.batch, sample.step_s) == (5.0, 0.02)
    assert sample.kv_tokens == 30 * LAYOUT.block_size
    few = report("n", running=6, free_blocks=60, engine_steps_total=3)
    [sample] = node_metrics.samples(first, node_metrics.heard(first, [few], 15.0))
    assert (sample.batch, sample.step_s, sample.kv_tokens) == (None, None, None)


def test_prompts_are_learnt_from_only_where_some_were_computed() -> None:
    first = node_metrics.heard({}, [report("n", "prefill")], 10.0)
    idle = node_metrics.samples(first, node_metrics.heard(first, [report("n", "prefill")], 15.0))
    assert idle == [NodeSample()]
    worked = report("n", "prefill", computed_prompt_tokens_total=900)
    [sample] = node_metrics.samples(first, node_metrics.heard(first, [worked], 15.0))
    assert sample == NodeSample(prefill_tokens_per_s=1000.0)


def test_the_prior_is_what_nodes_measured_each_role_by_its_own() -> None:
    slow = Speeds(prefill_tokens_per_s=10.0, decode_step_ms=90.0)
    prefill = msgspec.structs.replace(report("p", "prefill"), speeds=slow)
    prior = node_metrics.prior_of(node_metrics.heard({}, [prefill, report("d")], 0.0))
    assert prior is not None
    assert (prior.prefill_tokens, prior.step_base_s) == (10.0, 0.02)
    assert prior.step_per_seq_s == 0.02 / BATCH
    assert prior.kv_capacity == 100 * LAYOUT.block_size


def test_without_prefill_nodes_decode_nodes_say_what_prompts_cost() -> None:
    prior = node_metrics.prior_of(node_metrics.heard({}, [report("d")], 0.0))
    assert prior is not None
    assert prior.prefill_tokens == 1000.0


def test_who_has_measured_nothing_is_no_prior() -> None:
    mute = msgspec.structs.replace(report("d"), speeds=Speeds())
    assert node_metrics.prior_of(node_metrics.heard({}, [mute], 0.0)) is None
    assert node_metrics.prior_of({}) is None


def test_counters_that_go_back_and_more_free_blocks_than_there_are_read_as_nothing() -> None:
    before = report(fetched_bytes_total=100, free_blocks=500, engine_steps_total=9)
    first = node_metrics.heard({}, [before], 10.0)
    second = node_metrics.heard(first, [report(free_blocks=500)], 20.0)
    assert (second["d"].busy, second["d"].fetched) == (0.0, 0.0)
    assert node_metrics.kv_tokens(before) == 0
    assert node_metrics.store_read(second) == 0.0
