"""Placement policies: who is best by each, the same rules of hand-off for all, and what is told."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from baton_protocol.ids import NodeId
from baton_router.placement.policy import CONSIDERED_SHOWN, PAIRED, Placement, Policy, RequestFacts
from baton_router.settings import RANKINGS
from tests.support.nodes.candidates import Candidate, place_among

CHUNK = 16
PREFILLS = [Candidate(node=NodeId(f"p{n}"), role="prefill") for n in range(4)]
DECODES = [Candidate(node=NodeId(f"d{n}"), role="decode") for n in range(4)]


def prompt(tokens: int = 512, **more: Any) -> RequestFacts:
    stored = more.pop("stored", (False,) * (tokens // CHUNK))
    return RequestFacts(
        prompt_tokens=tokens, chunk_tokens=CHUNK, chunk_bytes=1 << 20, stored=stored, **more
    )


def placed(
    nodes: list[Candidate], ranking: Any, seed: int = 0, turn: int = 0, **more: Any
) -> Placement:
    facts = more.pop("facts", prompt())
    policy = Policy(ranking=ranking, **more)
    found = place_among(facts, nodes, policy, random.Random(seed), turn)
    assert isinstance(found, Placement)
    return found


def changed(nodes: list[Candidate], at: int, **changes: Any) -> list[Candidate]:
    return [replace(node, **changes) if n == at else node for n, node in enumerate(nodes)]


def test_random_asks_neither_for_queues_nor_for_prefixes() -> None:
    busy = changed(DECODES, 0, queued_tokens=10**6, sequences=100, requests=100)
    warm = changed(busy, 1, cached_chunks=32)
    found = Counter(placed(warm, "random", seed).decode for seed in range(400))
    assert set(found) == {"d0", "d1", "d2", "d3"}
    assert min(found.values()) > 60  # 100 expected, 9 the standard deviation


def test_in_turns_each_node_comes_once_in_a_round() -> None:
    nodes = [*PREFILLS, *changed(DECODES, 2, sequences=90)]
    round_of = [placed(nodes, "round-robin", turn=turn) for turn in range(8)]
    assert [each.decode for each in round_of] == ["d0", "d1", "d2", "d3"] * 2
    assert sorted(str(each.prefill) for each in round_of[:4]) == ["p0", "p1", "p2", "p3"]


def test_least_request_takes_the_node_with_fewest() -> None:
    prefills = [replace(node, requests=3 - n) for n, node in enumerate(PREFILLS)]
    decodes = [replace(node, requests=n) for n, node in enumerate(DECODES)]
    decodes = changed(decodes, 3, cached_chunks=20)
    found = placed([*prefills, *decodes], "least-request")
    assert (found.prefill, found.decode) == ("p3", "d0")


def test_prefix_takes_who_holds_most_of_it_whatever_waits_there() -> None:
    decodes = changed(DECODES, 1, cached_chunks=3)
    decodes = changed(decodes, 2, cached_chunks=9, queued_tokens=10**6, requests=99)
    assert {placed(decodes, "prefix", seed).decode for seed in range(20)} == {"d2"}
    assert len({placed(DECODES, "prefix", seed).decode for seed in range(60)}) == 4


@pytest.mark.parametrize("ranking", RANKINGS)
def test_every_policy_obeys_the_rules_of_hand_off(ranking: Any) -> None:
    nodes = [*PREFILLS, *DECODES]
    assert placed(nodes, ranking).reason == "split"
    assert placed(nodes, ranking, facts=prompt(100)).reason == "short"
    assert placed(nodes, ranking, handoff="never").prefill is None
    assert placed(nodes, ranking, handoff="always", facts=prompt(5)).prefill is not None
    assert placed(nodes, ranking, facts=prompt(store_up=False)).reason == "store_down"
    assert placed(nodes, ranking, facts=prompt(resumed=True)).reason == "resumed"
    assert placed(PREFILLS, ranking).reason == "no_decode"
    cut = [replace(node, store="down") for node in nodes[:3]] + nodes[3:]
    assert {placed(cut, ranking, seed).prefill for seed in range(20)} == {"p3"}
    slow = [replace(node, queued_tokens=5000) for node in PREFILLS]
    assert placed([*slow, *DECODES], ranking).reason == "costly"


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("handoff", ["auto", "never"])
def test_what_was_weighed_is_told_cheapest_first_and_in_parts(ranking: Any, handoff: Any) -> None:
    prefills = [replace(node, queued_tokens=50 * n) for n, node in enumerate(PREFILLS)]
    decodes = [
        replace(node, sequences=n, cached_chunks=n, queued_tokens=300 * n)
        for n, node in enumerate(DECODES)
    ]
    facts = prompt(stored=tuple(n < 10 for n in range(32)))
    for seed in range(10):
        found = placed(prefills + decodes, ranking, seed, turn=seed, facts=facts, handoff=handoff)
        costs = [each.predicted_ms for each in found.considered]
        assert costs == sorted(costs)
        pairs = 0 if handoff == "never" else len(PREFILLS) * len(DECODES)
        weighed = len(DECODES) + (pairs if ranking == "cost" else min(pairs, 1))
        assert len(costs) == min(weighed, CONSIDERED_SHOWN)
        for each in found.considered:
            parts = (each.queue_ms, each.compute_ms, each.fetch_ms, each.slowdown_ms)
            assert sum(parts) == pytest.approx(each.predicted_ms)
            assert all(part >= 0 for part in parts)
        [chosen] = [
            each
            for each in found.considered
            if (each.decode, each.prefill) == (found.decode, found.prefill)
        ]
        assert chosen.predicted_ms == pytest.approx(found.predicted_ms)
        assert chosen.uncached == found.uncached


def test_the_chosen_way_is_told_even_where_others_are_cheaper() -> None:
    nodes = [replace(DECODES[0], node=NodeId(f"d{n}"), queued_tokens=100 * n) for n in range(30)]
    found = placed(nodes, "round-robin", turn=29, handoff="never")
    assert found.decode == "d29"
    assert [each.decode for each in found.considered] == [*(f"d{n}" for n in range(7)), "d29"]


# --- ties -------------------------------------------------------------------------------------


def chi_square(counts: Counter[Any], cells: int, draws: int) -> float:
    expected = draws / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in counts) + expected * (
        cells - len(counts)
    )


@pytest.mark.parametrize(("handoff", "role"), [("never", "decode"), ("always", "prefill")])
def test_idle_nodes_share_the_work_evenly_also_beyond_those_that_are_paired(
    handoff: Any, role: str
) -> None:
    many = 3 * PAIRED
    nodes = [
        replace(node, node=NodeId(f"{node.role}{n}"))
        for node in (PREFILLS[0], DECODES[0])
        for n in range(many)
    ]
    rng, draws = random.Random(11), 10_000
    facts, policy = prompt(), Policy(handoff=handoff)
    found: Counter[Any] = Counter()
    for _ in range(draws):
        placement = place_among(facts, nodes, policy, rng)
        found[getattr(placement, role)] += 1
    # 47 degrees of freedom: 1 in 1,000 is beyond 82.7.
    assert chi_square(found, many, draws) < 82.7
