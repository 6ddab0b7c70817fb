"""When a pool is full: its sequences, its queued prompts, and which nodes compute prompts."""

from __future__ import annotations

from typing import Any

import pytest

from baton_protocol.store import Role, Speeds
from baton_router.admission.capacity import USUAL_SEQUENCES, AdmittedLoad, CapacityRule, has_room
from baton_router.nodes.node_view import NodeView
from tests.support.nodes.fake_node import make_report

RULE = CapacityRule(queue_ms=1000.0)
LONG = 100  # tokens of a prompt: 100 ms on any node


def node(role: Role = "decode", sequences: int = 0, tokens: int = 0, **report: Any) -> NodeView:
    """A node that takes 4 sequences and computes 1,000 prompt tokens a second."""
    facts = {"max_num_seqs": 4, "speeds": Speeds(prefill_tokens_per_s=1000.0)} | report
    view = NodeView(make_report("n", role, **facts), 0, 0, lambda: None)
    view.others_sequences, view.others_tokens = sequences, tokens
    return view


@pytest.mark.parametrize(
    ("sequences", "tokens", "room"),
    [(0, 0, True), (3, 999, True), (4, 0, False), (3, 1000, False), (9, 9999, False)],
)
def test_a_node_is_full_of_sequences_or_of_prompts(sequences: int, tokens: int, room: bool) -> None:
    assert has_room([node(sequences=sequences, tokens=tokens)], RULE, AdmittedLoad(), LONG) is room


def test_one_node_with_room_is_enough() -> None:
    assert has_room(
        [node(sequences=4), node(tokens=5000), node(sequences=3)], RULE, AdmittedLoad(), LONG
    )
    assert not has_room([node(sequences=4), node(tokens=5000)], RULE, AdmittedLoad(), LONG)


def test_admitted_load_that_is_not_booked_yet_counts() -> None:
    nodes = [node(sequences=3), node(sequences=3)]
    assert has_room(nodes, RULE, AdmittedLoad(sequences=1, tokens=1999), LONG)
    assert not has_room(nodes, RULE, AdmittedLoad(sequences=2), LONG)
    assert not has_room(nodes, RULE, AdmittedLoad(tokens=2000), LONG)


def test_a_booking_fills_a_node_before_its_next_report() -> None:
    full = node(sequences=3)
    full.booked_sequences = 1
    assert not has_room([full], RULE, AdmittedLoad(), LONG)


def test_prefill_nodes_compute_prompts_and_take_no_sequences() -> None:
    decode, prefill = node(tokens=5000), node("prefill")
    assert has_room([decode, prefill], RULE, AdmittedLoad(), LONG)
    assert not has_room(
        [decode, prefill], CapacityRule(queue_ms=1000.0, handoff="never"), AdmittedLoad(), LONG
    )
    assert not has_room([node(sequences=4), prefill], RULE, AdmittedLoad(), LONG)
    assert not has_room([decode, node("prefill", tokens=1000)], RULE, AdmittedLoad(), LONG)


@pytest.mark.parametrize("first", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("sequences", "queued", "room"),
    [(0, 1000, True), (3, 1000, True), (3, 301, True), (3, 300, False), (1, 100, False)],
)
def test_with_full_prefill_nodes_a_decode_node_counts_if_its_slowdown_is_below_their_wait(
    first: str, sequences: int, queued: int, room: bool
) -> None:
    """The 100 tokens delay each sequence on the decode node by 100 ms, and wait behind `queued`
    tokens on the prefill node."""
    nodes = [node(sequences=sequences), node("prefill", tokens=queued)]
    if first == "prefill":
        nodes.reverse()
    rule = CapacityRule(queue_ms=100.0)
    assert has_room(nodes, rule, AdmittedLoad(), LONG) is room
    assert has_room([*nodes, node("prefill", tokens=99)], rule, AdmittedLoad(), LONG)


def test_short_and_always_split_prompts_need_room_on_one_role_only() -> None:
    full, free = node("prefill", tokens=1000), node("prefill")
    always = CapacityRule(queue_ms=1000.0, handoff="always", handoff_tokens=128)
    assert not has_room([node(), full], always, AdmittedLoad(), LONG)
    assert has_room([node(tokens=1000), free], always, AdmittedLoad(), LONG)
    assert has_room([node()], always, AdmittedLoad(), LONG)
    short = CapacityRule(queue_ms=1000.0, handoff_tokens=128)
    busy = node(sequences=3, tokens=900)
    assert has_room([busy, full], short, AdmittedLoad(), 127)
    assert not has_room([node(tokens=1000), free], short, AdmittedLoad(), 127)
    assert has_room([node(tokens=1000), free], short, AdmittedLoad(), 128)


def test_in_a_shared_pool_a_tenant_may_use_a_quarter_of_a_queue_or_5_percent_over_its_share() -> (
    None
):
    for prompts, limit in ((False, 250), (True, 50)):
        rule = RULE.for_shared_pool(prompts=prompts, sequences=False)
        assert has_room([node(sequences=3, tokens=limit - 1)], rule, AdmittedLoad(), LONG)
        assert not has_room([node(tokens=limit)], rule, AdmittedLoad(), LONG)


def test_a_tenant_over_its_share_of_sequences_leaves_an_eighth_free() -> None:
    rule, limit = RULE.for_shared_pool(prompts=False, sequences=True), 64 - 8
    assert has_room([node(sequences=limit - 1, max_num_seqs=64)], rule, AdmittedLoad(), LONG)
    assert not has_room([node(sequences=limit, max_num_seqs=64)], rule, AdmittedLoad(), LONG)
    assert has_room([node(max_num_seqs=1)], rule, AdmittedLoad(), LONG)


@pytest.mark.parametrize(
    ("running", "choices", "room"),
    [(2, 2, True), (3, 2, False), (1, 3, True), (2, 9, True), (3, 9, False)],
)
def test_a_request_needs_room_for_all_its_choices_or_half_a_node_if_they_are_more(
    running: int, choices: int, room: bool
) -> None:
    nodes = [node(sequences=running), node(sequences=3)]
    assert has_room(nodes, RULE, AdmittedLoad(), LONG, choices) is room


def test_choices_need_room_in_addition_to_pending_sequences() -> None:
    nodes = [node(), node(sequences=2)]
    assert has_room(nodes, RULE, AdmittedLoad(sequences=4), LONG, 2)
    assert not has_room(nodes, RULE, AdmittedLoad(sequences=5), LONG, 2)


def test_prefill_nodes_alone_run_whole_requests() -> None:
    assert has_room([node("prefill", sequences=3)], RULE, AdmittedLoad(), LONG)
    assert not has_room([node("prefill", sequences=4)], RULE, AdmittedLoad(), LONG)


def test_a_pool_without_a_ready_node_is_not_full() -> None:
    assert has_room([], RULE, AdmittedLoad(sequences=9, tokens=9999), LONG)


def test_a_node_without_measured_speed_is_full_only_at_the_assumed_sequences() -> None:
    unknown: dict[str, Any] = {"max_num_seqs": 0, "speeds": Speeds()}
    assert has_room([node(tokens=10**9, **unknown)], RULE, AdmittedLoad(), LONG)
    assert not has_room([node(sequences=USUAL_SEQUENCES, **unknown)], RULE, AdmittedLoad(), LONG)


def test_the_rule_may_set_the_sequences_or_be_off() -> None:
    assert not has_room(
        [node(sequences=2)], CapacityRule(queue_ms=1000.0, sequences=2), AdmittedLoad(), LONG
    )
    assert has_room(
        [node(sequences=99, tokens=10**9)], CapacityRule(queue_ms=0.0), AdmittedLoad(), LONG
    )


def test_a_slow_node_takes_at_least_one_prompt() -> None:
    slow: dict[str, Any] = {"speeds": Speeds(prefill_tokens_per_s=0.1)}
    assert has_room([node(**slow)], RULE, AdmittedLoad(), LONG)
    assert not has_room([node(tokens=1, **slow)], RULE, AdmittedLoad(), LONG)


def test_a_node_of_any_role_has_room_for_a_vector() -> None:
    full, free = node(sequences=4, pooling="embed"), node("prefill", pooling="embed")
    assert has_room([full, free], RULE, AdmittedLoad(), LONG)
    assert not has_room([full, node("prefill", sequences=4)], RULE, AdmittedLoad(), LONG)
