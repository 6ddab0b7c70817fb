"""Placement policies: the best node under each, common hand-off rules, and reported options."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from baton_protocol.ids import NodeId
from baton_protocol.policies import RANKINGS
from baton_router.placement.costs import RequestFacts
from baton_router.placement.placement import Placement
from baton_router.placement.policy import CONSIDERED_SHOWN, PAIRED, PlacementPolicy
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
    policy = PlacementPolicy(ranking=ranking, **more)
    placement = place_among(facts, nodes, policy, random.Random(seed), turn)
    assert isinstance(placement, Placement)
    return placement


def changed(nodes: list[Candidate], at: int, **changes: Any) -> list[Candidate]:
    return [replace(node, **changes) if n == at else node for n, node in enumerate(nodes)]


def test_random_ignores_queues_and_prefixes() -> None:
    busy = changed(DECODES, 0, queued_tokens=10**6, sequences=100, requests=100)
    warm = changed(busy, 1, cached_chunks=32)
    counts = Counter(placed(warm, "random", seed).decode for seed in range(400))
    assert set(counts) == {"d0", "d1", "d2", "d3"}
    assert min(counts.values()) > 60  # expected 100, standard deviation 9


def test_round_robin_uses_each_node_once_per_round() -> None:
    nodes = [*PREFILLS, *changed(DECODES, 2, sequences=90)]
    placements = [placed(nodes, "round-robin", turn=turn) for turn in range(8)]
    assert [placement.decode for placement in placements] == ["d0", "d1", "d2", "d3"] * 2
    assert sorted(str(placement.prefill) for placement in placements[:4]) == [
        "p0",
        "p1",
        "p2",
        "p3",
    ]


def test_least_request_takes_the_node_with_the_fewest_requests() -> None:
    prefills = [replace(node, requests=3 - n) for n, node in enumerate(PREFILLS)]
    decodes = [replace(node, requests=n) for n, node in enumerate(DECODES)]
    decodes = changed(decodes, 3, cached_chunks=20)
    placement = placed([*prefills, *decodes], "least-request")
    assert (placement.prefill, placement.decode) == ("p3", "d0")


def test_prefix_takes_the_node_with_the_longest_prefix_whatever_its_queue() -> None:
    decodes = changed(DECODES, 1, cached_chunks=3)
    decodes = changed(decodes, 2, cached_chunks=9, queued_tokens=10**6, requests=99)
    assert {placed(decodes, "prefix", seed).decode for seed in range(20)} == {"d2"}
    assert len({placed(DECODES, "prefix", seed).decode for seed in range(60)}) == 4


@pytest.mark.parametrize("ranking", RANKINGS)
def test_every_policy_obeys_the_hand_off_rules(ranking: Any) -> None:
    nodes = [*PREFILLS, *DECODES]
    assert placed(nodes, ranking).reason == "split"
    assert placed(nodes, ranking, facts=prompt(100)).reason == "short"
    assert placed(nodes, ranking, handoff="never").prefill is None
    assert placed(nodes, ranking, handoff="always", facts=prompt(5)).prefill is not None
    assert placed(nodes, ranking, facts=prompt(store_up=False)).reason == "store_down"
    assert placed(nodes, ranking, facts=prompt(resumed=True)).reason == "resumed"
    assert placed(PREFILLS, ranking).reason == "no_decode"
    without_store = [replace(node, store="down") for node in nodes[:3]] + nodes[3:]
    assert {placed(without_store, ranking, seed).prefill for seed in range(20)} == {"p3"}
    queued = [replace(node, queued_tokens=5000) for node in PREFILLS]
    assert placed([*queued, *DECODES], ranking).reason == "costly"


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("handoff", ["auto", "never"])
def test_considered_options_are_listed_cheapest_first_with_their_cost_parts(
    ranking: Any, handoff: Any
) -> None:
    prefills = [replace(node, queued_tokens=50 * n) for n, node in enumerate(PREFILLS)]
    decodes = [
        replace(node, sequences=n, cached_chunks=n, queued_tokens=300 * n)
        for n, node in enumerate(DECODES)
    ]
    facts = prompt(stored=tuple(n < 10 for n in range(32)))
    for seed in range(10):
        placement = placed(
            prefills + decodes, ranking, seed, turn=seed, facts=facts, handoff=handoff
        )
        costs = [option.predicted_ms for option in placement.considered]
        assert costs == sorted(costs)
        pairs = 0 if handoff == "never" else len(PREFILLS) * len(DECODES)
        options = len(DECODES) + (pairs if ranking == "cost" else min(pairs, 1))
        assert len(costs) == min(options, CONSIDERED_SHOWN)
        for option in placement.considered:
            parts = (option.queue_ms, option.compute_ms, option.fetch_ms, option.slowdown_ms)
            assert sum(parts) == pytest.approx(option.predicted_ms)
            assert all(part >= 0 for part in parts)
        [chosen] = [
            option
            for option in placement.considered
            if (option.decode, option.prefill) == (placement.decode, placement.prefill)
        ]
        assert chosen.predicted_ms == pytest.approx(placement.predicted_ms)
        assert chosen.uncached == placement.uncached


def test_the_chosen_option_is_listed_even_if_many_others_are_cheaper() -> None:
    nodes = [replace(DECODES[0], node=NodeId(f"d{n}"), queued_tokens=100 * n) for n in range(30)]
    placement = placed(nodes, "round-robin", turn=29, handoff="never")
    assert placement.decode == "d29"
    assert [option.decode for option in placement.considered] == [
        *(f"d{n}" for n in range(7)),
        "d29",
    ]


# --- ties -------------------------------------------------------------------------------------


def chi_square(counts: Counter[Any], cells: int, draws: int) -> float:
    expected = draws / cells
    return sum((counts[cell] - expected) ** 2 / expected for cell in counts) + expected * (
        cells - len(counts)
    )


@pytest.mark.parametrize(("handoff", "role"), [("never", "decode"), ("always", "prefill")])
def test_idle_nodes_of_a_pool_larger_than_paired_share_the_requests_evenly(
    handoff: Any, role: str
) -> None:
    many = 3 * PAIRED
    nodes = [
        replace(node, node=NodeId(f"{node.role}{n}"))
        for node in (PREFILLS[0], DECODES[0])
        for n in range(many)
    ]
    rng, draws = random.Random(11), 3_000
    facts, policy = prompt(), PlacementPolicy(handoff=handoff)
    counts: Counter[Any] = Counter()
    for _ in range(draws):
        placement = place_among(facts, nodes, policy, rng)
        counts[getattr(placement, role)] += 1
    # 47 degrees of freedom: P(X > 82.7) = 0.001.
    assert chi_square(counts, many, draws) < 82.7
