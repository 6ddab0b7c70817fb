"""When a pool is full: sequences, prompts before a request, and what prefill nodes lend."""

from __future__ import annotations

from typing import Any

import pytest

from baton_protocol.store import Role, Speeds
from baton_router.node_view import NodeView
from baton_router.room import USUAL_SEQUENCES, Load, Rule, has_room
from tests.support.fake_node import make_report

RULE = Rule(queue_ms=1000.0)


def node(role: Role = "decode", sequences: int = 0, tokens: int = 0, **report: Any) -> NodeView:
    """One that takes 4 sequences and computes 1,000 prompt tokens a second."""
    facts = {"max_num_seqs": 4, "speeds": Speeds(prefill_tokens_per_s=1000.0)} | report
    view = NodeView(make_report("n", role, **facts), 0, 0, lambda: None)
    view.others_sequences, view.others_tokens = sequences, tokens
    return view


@pytest.mark.parametrize(
    ("sequences", "tokens", "room"),
    [(0, 0, True), (3, 999, True), (4, 0, False), (3, 1000, False), (9, 9999, False)],
)
def test_a_node_is_full_of_sequences_or_of_prompts(sequences: int, tokens: int, room: bool) -> None:
    assert has_room([node(sequences=sequences, tokens=tokens)], RULE, Load()) is room


def test_one_node_with_room_is_enough() -> None:
    assert has_room([node(sequences=4), node(tokens=5000), node(sequences=3)], RULE, Load())
    assert not has_room([node(sequences=4), node(tokens=5000)], RULE, Load())


def test_what_was_let_in_and_is_not_booked_yet_counts() -> None:
    nodes = [node(sequences=3), node(sequences=3)]
    assert has_room(nodes, RULE, Load(sequences=1, tokens=1999))
    assert not has_room(nodes, RULE, Load(sequences=2))
    assert not has_room(nodes, RULE, Load(tokens=2000))


def test_a_booking_fills_a_node_before_its_report_says_so() -> None:
    full = node(sequences=3)
    full.booked_sequences = 1
    assert not has_room([full], RULE, Load())


def test_prefill_nodes_lend_their_time_and_no_sequences() -> None:
    decode, prefill = node(tokens=5000), node("prefill")
    assert has_room([decode, prefill], RULE, Load())
    assert not has_room([decode, prefill], Rule(queue_ms=1000.0, hands_over=False), Load())
    assert not has_room([node(sequences=4), prefill], RULE, Load())
    assert not has_room([decode, node("prefill", tokens=1000)], RULE, Load())


def test_prefill_nodes_alone_run_whole_requests() -> None:
    assert has_room([node("prefill", sequences=3)], RULE, Load())
    assert not has_room([node("prefill", sequences=4)], RULE, Load())


def test_a_pool_without_a_ready_node_is_not_full() -> None:
    assert has_room([], RULE, Load(sequences=9, tokens=9999))


def test_a_node_that_has_measured_nothing_and_says_nothing_is_full_of_sequences_only() -> None:
    unknown: dict[str, Any] = {"max_num_seqs": 0, "speeds": Speeds()}
    assert has_room([node(tokens=10**9, **unknown)], RULE, Load())
    assert not has_room([node(sequences=USUAL_SEQUENCES, **unknown)], RULE, Load())


def test_the_rule_may_name_sequences_and_may_be_off() -> None:
    assert not has_room([node(sequences=2)], Rule(queue_ms=1000.0, sequences=2), Load())
    assert has_room([node(sequences=99, tokens=10**9)], Rule(queue_ms=0.0), Load())


def test_a_slow_node_takes_one_prompt_at_least() -> None:
    slow: dict[str, Any] = {"speeds": Speeds(prefill_tokens_per_s=0.1)}
    assert has_room([node(**slow)], RULE, Load())
    assert not has_room([node(tokens=1, **slow)], RULE, Load())
