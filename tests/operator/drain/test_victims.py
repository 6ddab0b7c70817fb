"""Scale-down chooses the least loaded nodes first, each with a reason."""

from __future__ import annotations

import pytest

from baton_operator.drain.victims import Victim, choose_victims, live_requests
from baton_operator.state.observed import ObservedPod
from baton_protocol.store import NodeLoad, NodeReport
from tests.operator.drain.surplus import load, node

SINCE = "2026-05-04T11:59:30Z"
BUSY = (load("a", 3), load("b", 1), load("c", 2))


def chosen(
    pods: list[ObservedPod], surplus: int, *reports: NodeReport, answered: bool = True
) -> list[str]:
    return [victim.pod.name for victim in _choose(pods, surplus, *reports, answered=answered)]


def _choose(
    pods: list[ObservedPod], surplus: int, *reports: NodeReport, answered: bool = True
) -> list[Victim]:
    by_name = {str(report.node): report for report in reports}
    return choose_victims(pods, by_name if answered else None, surplus)


@pytest.mark.parametrize(
    ("pods", "reports", "expected"),
    [
        ([node("a"), node("b"), node("c")], BUSY, ["b", "c"]),
        (
            [node("a"), node("b"), node("c")],
            (load("a", 1, 30), load("b", 1, 10), load("c", 1, 20)),
            ["b", "c"],
        ),
        ([node("a"), node("b"), node("c")], (load("b"), load("a"), load("c")), ["a", "b"]),
        ([node("a", ready=False), node("b"), node("c")], BUSY, ["a", "b"]),
        (
            [node("a", ready=False), node("b"), node("c", ready=False, stage="pending")],
            BUSY,
            ["c", "a"],
        ),
        (
            [node("a", ready=False, stage="unplaced"), node("b", ready=False, stage="pending")],
            (),
            ["a", "b"],
        ),
        ([node("a", drain_since=SINCE), node("b"), node("c")], BUSY, ["a", "b"]),
        (
            [node("a", drain_since=SINCE), node("b", ready=False), node("c")],
            BUSY,
            ["b", "a"],
        ),
        (
            [node("a"), node("b"), node("c")],
            (load("a", 3, state="draining"), load("b", 1), load("c", 2)),
            ["a", "b"],
        ),
        ([node("a"), node("b"), node("c")], (load("b", 9), load("c", 7)), ["c", "b"]),
    ],
    ids=[
        "fewest live requests",
        "then fewest cached blocks",
        "then by name",
        "an unready node before the idlest",
        "a pod that has not started before an unready one",
        "an unscheduled pod before a pending one",
        "a marked node stays chosen when the loads change",
        "an unready node before a marked one",
        "a node that was drained by hand",
        "a node without a report last",
    ],
)
def test_the_nodes_with_the_least_load_are_chosen_first(
    pods: list[ObservedPod], reports: tuple[NodeReport, ...], expected: list[str]
) -> None:
    assert chosen(pods, 2, *reports) == expected


def test_no_node_is_chosen_without_a_surplus() -> None:
    assert chosen([node("a"), node("b")], 0, *BUSY) == []
    assert chosen([node("a"), node("b")], -1, *BUSY) == []


def test_without_an_answer_of_the_index_only_nodes_whose_load_does_not_matter_are_chosen() -> None:
    pods = [node("a"), node("b"), node("c", ready=False), node("d", drain_since=SINCE)]
    assert chosen(pods, 3, answered=False) == ["c", "d"]
    assert chosen(pods, 1, answered=False) == ["c"]


def test_without_an_answer_all_nodes_are_chosen_if_none_is_to_stay() -> None:
    assert chosen([node("b"), node("a")], 2, answered=False) == ["a", "b"]


def test_a_patient_choice_waits_for_an_answer_even_if_no_node_is_to_stay() -> None:
    pods = [node("b"), node("a", ready=False), node("c", drain_since=SINCE)]
    patient = choose_victims(pods, None, 3, patient=True)
    assert [victim.pod.name for victim in patient] == ["a", "c"]


@pytest.mark.parametrize(
    ("pod", "reports", "surplus", "why"),
    [
        (node("a"), BUSY, 3, "least loaded: 3 live requests, 0 cached blocks"),
        (node("a"), BUSY, 4, "its role scales to 0 nodes"),
        (node("a"), (), 3, "no node of its role has a report"),
        (node("a", ready=False), (), 3, "it is not ready"),
        (node("a", ready=False, stage="pending"), (), 3, "it has not started"),
        (
            node("a"),
            (load("a", 1, 7, state="draining"),),
            3,
            "drained by hand, with 1 live requests, 7 cached blocks",
        ),
        (
            node("a", drain_since=SINCE, drain_reason="it was so then"),
            BUSY,
            3,
            "it was so then",
        ),
    ],
    ids=["load", "all", "unknown", "unready", "pending", "by hand", "marked"],
)
def test_each_choice_has_a_reason(
    pod: ObservedPod, reports: tuple[NodeReport, ...], surplus: int, why: str
) -> None:
    others = [node(name) for name in ("b", "c", "d")]
    [victim] = [one for one in _choose([pod, *others], surplus, *reports) if one.pod == pod]
    assert victim.why == why


def test_a_node_that_a_roll_out_replaces_does_not_say_that_its_role_scales_to_0() -> None:
    pods = [node("a"), node("b")]
    victims = choose_victims(pods, {}, 2, replaced=True)
    assert {victim.why for victim in victims} == {"all nodes of its revision are replaced"}


def test_live_requests_include_those_that_only_the_engine_or_only_the_server_knows() -> None:
    old = load("a", load=NodeLoad(running=1, waiting=2, parked=3))
    assert live_requests(old) == 6
    assert live_requests(load("a", load=NodeLoad(running=1, requests=2))) == 2
