"""The planner's nodes from pods and gauges, and how long starts took."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_operator.autoscaling.node_metrics import Gauge, Gauges, add_reports
from baton_operator.autoscaling.observed_nodes import StartTimes, observe_nodes
from baton_operator.autoscaling.planner.inputs import ObservedNode, Phase
from baton_operator.state.observed import FirstSeen, ObservedPod
from baton_operator.state.readers import read_pod
from baton_protocol.store import Role
from tests.support.kubernetes import pod_bodies as b
from tests.support.nodes.fake_node import LAYOUT
from tests.support.planner.builders import node_report
from tests.support.planner.observations import pod, stamp

ONE: dict[Role, int] = {"prefill": 1, "decode": 1}


def observed_nodes(
    *pods: ObservedPod,
    gauges: Gauges | None = None,
    desired: dict[Role, int] | None = None,
    rolling: bool = False,
) -> dict[str, ObservedNode]:
    nodes = observe_nodes(
        pods,
        gauges or {},
        desired or {"prefill": 9, "decode": 9},
        rolling=rolling,
        now_s=50.0,
    )
    return {node.name: node for node in nodes}


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
    [node] = observed_nodes(pod("decode", **changes)).values()
    assert (node.phase, node.role) == (phase, "decode")


def test_finished_pods_and_pods_of_other_components_are_not_nodes() -> None:
    assert observed_nodes(pod("decode", stage="over"), pod("router"), pod("kv-data")) == {}


def test_a_node_that_was_drained_by_hand_is_draining() -> None:
    decode_pod = pod("decode")
    drained = msgspec.structs.replace(node_report(decode_pod.name), state="draining")
    assert (
        observed_nodes(decode_pod, gauges={decode_pod.name: Gauge(50.0, drained)})[
            decode_pod.name
        ].phase
        == Phase.DRAINING
    )


def test_a_node_that_sleeps_until_it_is_needed_counts_as_ready_from_when_it_was_last_asleep() -> (
    None
):
    decode_pod = pod("decode")
    report = msgspec.structs.replace(
        node_report(decode_pod.name), state="draining", asleep=True, wakes=True
    )
    gauges = add_reports({}, [report], 40.0)
    [node] = observed_nodes(decode_pod, gauges=gauges).values()
    assert (node.phase, node.asleep, node.since_s) == (Phase.READY, True, 10.0)
    awake = msgspec.structs.replace(report, state="ready", asleep=False, wakes=False)
    [node] = observed_nodes(decode_pod, gauges=add_reports(gauges, [awake], 45.0)).values()
    assert (node.phase, node.asleep, node.since_s) == (Phase.READY, False, 10.0)


def test_gauges_have_the_values_and_the_age_of_the_newest_report() -> None:
    decode_pod = pod("decode")
    newest = node_report(decode_pod.name, queued_tokens=7, running=3, waiting=2, free_blocks=60)
    node = observed_nodes(decode_pod, gauges={decode_pod.name: Gauge(38.0, newest, 0.5)})[
        decode_pod.name
    ]
    assert (node.age_s, node.queued_tokens, node.running, node.waiting) == (12.0, 7, 3, 2)
    assert (node.kv_tokens, node.kv_capacity) == (40 * LAYOUT.block_size, 100 * LAYOUT.block_size)
    assert node.busy == 0.5


def test_gauges_of_a_node_without_a_report_are_unknown_and_not_zero() -> None:
    [node] = observed_nodes(pod("decode")).values()
    assert (node.age_s, node.running, node.busy, node.kv_tokens) == (None, None, None, None)


def test_the_age_of_a_phase_counts_from_when_the_operator_first_saw_it() -> None:
    hour_ahead = stamp(3600)
    seen = FirstSeen(created=5.0, readiness=10.0, drain=45.0)
    ready = pod("decode", 0, ready_since=hour_ahead, seen=seen)
    starting = pod("decode", 1, ready=False, unready_since=hour_ahead, seen=seen)
    draining = pod("decode", 2, drain_since=hour_ahead, ready_since=hour_ahead, seen=seen)
    nodes = observed_nodes(ready, starting, draining)
    assert [node.since_s for node in nodes.values()] == [40.0, 45.0, 5.0]


def test_surplus_nodes_count_as_draining_unready_ones_first() -> None:
    pods = [pod("decode", 0), pod("decode", 1), pod("decode", 2, ready=False)]
    phases = [
        node.phase for node in observed_nodes(*pods, desired={"prefill": 0, "decode": 1}).values()
    ]
    assert phases == [Phase.DRAINING, Phase.READY, Phase.DRAINING]
    marked = [pod("decode", 0, drain_since=stamp(-1)), pod("decode", 1)]
    assert [node.phase for node in observed_nodes(*marked, desired=ONE).values()] == [
        Phase.DRAINING,
        Phase.READY,
    ]


def test_in_a_roll_out_no_node_is_surplus() -> None:
    pods = [pod("decode", 0), pod("decode", 1, revision="old")]
    assert {node.phase for node in observed_nodes(*pods, desired=ONE, rolling=True).values()} == {
        Phase.READY
    }


def test_the_duration_of_a_start_is_reported_once() -> None:
    starts = StartTimes()
    assert starts.take_ended([pod("decode", ready=False, seen=FirstSeen(created=10.0))]) == []
    ready = pod("decode", seen=FirstSeen(created=10.0, readiness=70.0))
    assert starts.take_ended([ready]) == [60.0]
    assert starts.take_ended([ready]) == []


@pytest.mark.parametrize(
    ("problem", "known"),
    [("", True), ("NodeLost", True), ("NodeLost", False)],
    ids=["not ready", "its machine is silent", "its machine is silent for a new operator"],
)
def test_a_node_that_was_away_for_a_moment_counts_no_new_start(problem: str, known: bool) -> None:
    """Otherwise the operator would learn that a start takes a day."""
    starts = StartTimes()
    served = pod("decode", seen=FirstSeen(created=0.0, readiness=50.0))
    away = pod(
        "decode", ready=False, problem=problem, seen=FirstSeen(created=0.0, readiness=86_000.0)
    )
    back = pod("decode", seen=FirstSeen(created=0.0, readiness=86_400.0))
    if known:
        assert starts.take_ended([served]) == []
    assert starts.take_ended([away]) == []
    assert starts.take_ended([back]) == []


def test_ready_since_is_read_from_the_pod_s_condition() -> None:
    body = b.pod(b.container(b.RUNNING, ready=True))
    conditions = body["status"].setdefault("conditions", [])
    conditions[:] = [condition for condition in conditions if condition["type"] != "Ready"]
    conditions.append({"type": "Ready", "status": "True", "lastTransitionTime": stamp(-10)})
    observed_pod = read_pod(body)
    assert observed_pod.ready_since == stamp(-10)
    conditions[-1]["status"] = "False"
    assert read_pod(body).ready_since == ""
