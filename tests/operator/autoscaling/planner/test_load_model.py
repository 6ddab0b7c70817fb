"""The queue formula, and what counts as load."""

from __future__ import annotations

from dataclasses import replace
from math import exp

from baton_operator.autoscaling.planner.inputs import Phase
from baton_operator.autoscaling.planner.load_model import servers_for
from tests.support.planner.builders import decide, demand, node, nodes, observed_pool


def test_one_server_is_enough_up_to_the_load_of_the_m_m_1_formula() -> None:
    # M/M/1: P(wait > t) = a exp(-(1 - a) t / S); with t = S one server holds 95 % up to a = 0.116.
    for load in (0.05, 0.1, 0.13, 0.5):
        expected = load * exp(-(1.0 - load)) <= 0.05
        assert (servers_for(load, 1.0, 1.0, 0.95) == 1) == expected


def test_servers_agree_with_a_table_of_erlang_c() -> None:
    # C(5, 4) = 0.5541, C(6, 4) = 0.2848, C(7, 4) = 0.1351, C(8, 4) = 0.0590: no wait at all.
    assert servers_for(4.0, 1.0, 0.0, 0.44) == 5
    assert servers_for(4.0, 1.0, 0.0, 0.45) == 6
    assert servers_for(4.0, 1.0, 0.0, 0.865) == 8
    assert servers_for(4.0, 1.0, 0.0, 0.86) == 7


def test_more_load_needs_no_fewer_servers_and_no_load_needs_none() -> None:
    counts = [servers_for(0.1 * step, 0.3, 0.5, 0.95) for step in range(400)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert all(count > 0.1 * step for step, count in enumerate(counts) if step)


def test_starting_nodes_are_not_requested_twice() -> None:
    started = (*nodes(demand(20.0), 2, 2), node("prefill", 2, Phase.PENDING, since_s=0.0))
    first = decide(observed_pool(2, 2, 20.0))
    second = decide(observed_pool(3, 2, 20.0, nodes=started))
    assert (first.prefill, second.prefill) == (3, 3)


def test_requests_queued_for_prefill_count_for_decode() -> None:
    calm = observed_pool(8, 2, 20.0)
    queue = tuple(
        replace(ready, queued_tokens=60_000) if ready.role == "prefill" else ready
        for ready in calm.nodes
    )
    assert decide(calm).decode == 2
    assert decide(replace(calm, nodes=queue)).decode > 2
