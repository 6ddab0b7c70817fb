"""Node views for the planner and samples for learning, built from pods and reports."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.autoscaling import node_metrics
from baton_operator.autoscaling.node_metrics import BATCH, Gauge
from baton_operator.autoscaling.node_views import Starts, nodes_of
from baton_operator.autoscaling.planner.capability import NodeSample
from baton_operator.autoscaling.planner.inputs import ObservedNode, Phase
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
) -> dict[str, ObservedNode]:
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
def test_the_phase_of_a_node_follows_from_its_pod(changes: dict[str, Any], phase: Phase) -> None:
    [view] = views(pod("decode", **changes)).values()
    assert (view.phase, view.role) == (phase, "decode")


def test_finished_pods_and_pods_of_other_components_are_not_nodes() -> None:
    assert views(pod("decode", stage="over"), pod("router"), pod("kv-data")) == {}


def test_a_node_that_was_drained_by_hand_is_draining() -> None:
    one = pod("decode")
    drained = msgspec.structs.replace(report(one.name), state="draining")
    assert views(one, known={one.name: Gauge(50.0, drained)})[one.name].phase == Phase.DRAINING


def test_gauges_have_the_values_and_the_age_of_the_newest_report() -> None:
    one = pod("decode")
    newest = report(one.name, queued_tokens=7, running=3, waiting=2, free_blocks=60)
    view = views(one, known={one.name: Gauge(38.0, newest, 0.5)})[one.name]
    assert (view.age_s, view.queued_tokens, view.running, view.waiting) == (12.0, 7, 3, 2)
    assert (view.kv_tokens, view.kv_capacity) == (40 * LAYOUT.block_size, 100 * LAYOUT.block_size)
    assert view.busy == 0.5


def test_gauges_of_a_node_without_a_report_are_unknown_and_not_zero() -> None:
    [view] = views(pod("decode")).values()
    assert (view.age_s, view.running, view.busy, view.kv_tokens) == (None, None, None, None)


def test_the_age_of_a_phase_counts_from_when_the_operator_first_saw_it() -> None:
    hour_ahead = stamp(3600)
    seen = FirstSeen(created=5.0, readiness=10.0, drain=45.0)
    ready = pod("decode", 0, ready_since=hour_ahead, seen=seen)
    starting = pod("decode", 1, ready=False, unready_since=hour_ahead, seen=seen)
    draining = pod("decode", 2, drain_since=hour_ahead, ready_since=hour_ahead, seen=seen)
    found = views(ready, starting, draining)
    assert [view.since_s for view in found.values()] == [40.0, 45.0, 5.0]


def test_surplus_nodes_count_as_draining_unready_ones_first() -> None:
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


def test_the_duration_of_a_start_is_reported_once() -> None:
    starts = Starts()
    assert starts.ended([pod("decode", ready=False, seen=FirstSeen(created=10.0))]) == []
    ready = pod("decode", seen=FirstSeen(created=10.0, readiness=70.0))
    assert starts.ended([ready]) == [60.0]
    assert starts.ended([ready]) == []


@pytest.mark.parametrize(
    ("problem", "known"),
    [("", True), ("NodeLost", True), ("NodeLost", False)],
    ids=["not ready", "its machine is silent", "its machine is silent for a new operator"],
)
def test_a_node_that_was_away_for_a_moment_counts_no_new_start(problem: str, known: bool) -> None:
    """Otherwise the operator would learn that a start takes a day."""
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


def test_ready_since_is_read_from_the_pod_s_condition() -> None:
    body = b.pod(b.container(b.RUNNING, ready=True))
    conditions = body["status"].setdefault("conditions", [])
    conditions[:] = [one for one in conditions if one["type"] != "Ready"]
    conditions.append({"type": "Ready", "status": "True", "lastTransitionTime": stamp(-10)})
    found = read_pod(body)
    assert found.ready_since == stamp(-10)
    conditions[-1]["status"] = "False"
    assert read_pod(body).ready_since == ""


def test_a_silent_node_keeps_its_last_gauges() -> None:
    first = node_metrics.updated({}, [report("a"), report("b")], 10.0)
    then = node_metrics.updated(first, [report("b", running=4)], 15.0)
    assert (then["a"].at_s, then["b"].at_s) == (10.0, 15.0)
    assert then["b"].report.load.running == 4


def heard_twice(role: Role, before: dict[str, int], after: dict[str, int]) -> dict[str, Gauge]:
    first = node_metrics.updated({}, [report("n", role, **before)], 10.0)
    return node_metrics.updated(first, [report("n", role, **after)], 15.0)


def test_the_busy_share_of_a_node_follows_from_its_counters_and_speeds() -> None:
    prompts = heard_twice("prefill", {}, {"computed_prompt_tokens_total": 2500})
    assert prompts["n"].busy == 0.5
    steps = heard_twice("decode", {}, {"engine_steps_total": 50})
    assert steps["n"].busy == pytest.approx(0.2)
    assert heard_twice("decode", {}, {"engine_steps_total": 5000})["n"].busy == 1.0
    assert heard_twice("decode", {}, {})["n"].busy == 0.0
    assert node_metrics.updated({}, [report("n")], 10.0)["n"].busy is None


def test_the_read_rate_of_the_store_comes_from_nodes_with_two_reports() -> None:
    twice = heard_twice("prefill", {"fetched_bytes_total": 500}, {"fetched_bytes_total": 2500})
    assert node_metrics.store_read(twice) == 400.0
    assert node_metrics.store_read(node_metrics.updated(twice, [report("m")], 15.0)) == 400.0
    assert node_metrics.store_read(node_metrics.updated({}, [report("m")], 15.0)) is None


def test_reports_of_different_epochs_are_not_compared() -> None:
    first = node_metrics.updated({}, [report("n", engine_steps_total=900)], 10.0)
    restarted = msgspec.structs.replace(report("n"), epoch=Epoch("epoch-2"))
    then = node_metrics.updated(first, [restarted], 15.0)
    assert then["n"].busy is None
    assert node_metrics.samples(first, then) == []


def test_step_times_are_learnt_only_while_a_batch_runs() -> None:
    first = node_metrics.updated({}, [report("n", running=4, free_blocks=80)], 10.0)
    newest = report("n", running=6, free_blocks=60, engine_steps_total=100)
    [sample] = node_metrics.samples(first, node_metrics.updated(first, [newest], 15.0))
    assert (sample.batch, sample.step_s) == (5.0, 0.02)
    assert sample.kv_tokens == 30 * LAYOUT.block_size
    few = report("n", running=6, free_blocks=60, engine_steps_total=3)
    [sample] = node_metrics.samples(first, node_metrics.updated(first, [few], 15.0))
    assert (sample.batch, sample.step_s, sample.kv_tokens) == (None, None, None)


def test_prefill_speeds_are_learnt_only_if_prompts_were_computed() -> None:
    first = node_metrics.updated({}, [report("n", "prefill")], 10.0)
    idle = node_metrics.samples(first, node_metrics.updated(first, [report("n", "prefill")], 15.0))
    assert idle == [NodeSample()]
    worked = report("n", "prefill", computed_prompt_tokens_total=900)
    [sample] = node_metrics.samples(first, node_metrics.updated(first, [worked], 15.0))
    assert sample == NodeSample(prefill_tokens_per_s=1000.0)


def test_the_prior_takes_each_speed_from_nodes_of_its_role() -> None:
    slow = Speeds(prefill_tokens_per_s=10.0, decode_step_ms=90.0)
    prefill = msgspec.structs.replace(report("p", "prefill"), speeds=slow)
    prior = node_metrics.prior_of(node_metrics.updated({}, [prefill, report("d")], 0.0))
    assert prior is not None
    assert (prior.prefill_tokens, prior.step_base_s) == (10.0, 0.02)
    assert prior.step_per_seq_s == 0.02 / BATCH
    assert prior.kv_capacity == 100 * LAYOUT.block_size


def test_without_prefill_nodes_the_prior_takes_the_prefill_speed_of_decode_nodes() -> None:
    prior = node_metrics.prior_of(node_metrics.updated({}, [report("d")], 0.0))
    assert prior is not None
    assert prior.prefill_tokens == 1000.0


def test_nodes_without_measurements_give_no_prior() -> None:
    unmeasured = msgspec.structs.replace(report("d"), speeds=Speeds())
    assert node_metrics.prior_of(node_metrics.updated({}, [unmeasured], 0.0)) is None
    assert node_metrics.prior_of({}) is None


def test_decreasing_counters_and_too_many_free_blocks_count_as_zero() -> None:
    before = report(fetched_bytes_total=100, free_blocks=500, engine_steps_total=9)
    first = node_metrics.updated({}, [before], 10.0)
    second = node_metrics.updated(first, [report(free_blocks=500)], 20.0)
    assert (second["d"].busy, second["d"].fetched) == (0.0, 0.0)
    assert node_metrics.kv_tokens(before) == 0
    assert node_metrics.store_read(second) == 0.0
