"""Placement: the lowest predicted cost wins, ties are spread, and each hand-off mode is obeyed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_protocol.ids import NodeId
from baton_protocol.store import Role, Speeds
from baton_router.placement.costs import (
    FALLBACK,
    NodeCosts,
    PairCosts,
    RequestFacts,
)
from baton_router.placement.placement import Missing, Placement
from baton_router.placement.policy import PAIRED, TIE_MS, TIE_SHARE, PlacementPolicy
from tests.support.nodes.candidates import (
    Candidate,
    candidates_of,
    fill_group_speeds,
    group_of,
    place_among,
)

CHUNK = 16
SPEEDS = Speeds(
    prefill_tokens_per_s=1000.0,
    decode_step_ms=20.0,
    put_bytes_per_s=1e9,
    get_bytes_per_s=1e9,
    get_latency_ms=1.0,
)


def node(name: str, role: Role, **more: Any) -> Candidate:
    return Candidate(node=NodeId(name), role=role, **({"speeds": SPEEDS} | more))


def prompt(tokens: int, stored: int = 0, **more: Any) -> RequestFacts:
    chunks = tokens // CHUNK
    in_store = tuple(index < stored for index in range(chunks))
    return RequestFacts(
        prompt_tokens=tokens, chunk_tokens=CHUNK, chunk_bytes=1 << 20, stored=in_store, **more
    )


def chosen(facts: RequestFacts, nodes: list[Candidate], seed: int = 0, **policy: Any) -> Placement:
    placement = place_among(facts, nodes, PlacementPolicy(**policy), random.Random(seed))
    assert isinstance(placement, Placement)
    return placement


def missing(facts: RequestFacts, nodes: list[Candidate], **policy: Any) -> Missing:
    result = place_among(facts, nodes, PlacementPolicy(**policy), random.Random(0))
    assert isinstance(result, Missing)
    return result


def costs(facts: RequestFacts, *nodes: Candidate) -> NodeCosts:
    return NodeCosts(facts, group_of(nodes))


def pairs_ms(facts: RequestFacts, prefills: list[Candidate], decodes: list[Candidate]) -> Any:
    """The predicted cost of each pair, shape (prefills, decodes)."""
    rows, columns = np.arange(len(prefills)), np.arange(len(decodes))
    return PairCosts(costs(facts, *prefills), costs(facts, *decodes), rows, columns).split_ms


def pair_ms(facts: RequestFacts, prefill: Candidate, decode: Candidate) -> float:
    return float(pairs_ms(facts, [prefill], [decode])[0, 0])


def filled(nodes: list[Candidate]) -> list[Candidate]:
    """The nodes, with fallbacks in place of unmeasured speeds."""
    [group] = fill_group_speeds([group_of(nodes)])
    candidates = candidates_of(group, "decode")
    return [
        replace(candidate, role=node.role)
        for candidate, node in zip(candidates, nodes, strict=True)
    ]


P0, P1 = node("p0", "prefill"), node("p1", "prefill")
D0, D1 = node("d0", "decode"), node("d1", "decode")


def test_without_ready_nodes_there_is_no_placement() -> None:
    assert missing(prompt(100), []).explanation == "no node is ready"


def test_auto_splits_a_long_uncached_prompt_and_explains_it() -> None:
    placement = chosen(prompt(512), [P0, D0])
    assert (placement.prefill, placement.decode, placement.reason) == ("p0", "d0", "split")
    assert placement.header_line().startswith(
        "prefill=p0 decode=d0 reason=split: uncached 512 of 512"
    )
    assert placement.header_line().isascii()
    assert "\n" not in placement.header_line()


def test_auto_keeps_a_short_prompt_on_the_decode_node() -> None:
    placement = chosen(prompt(127), [P0, D0])
    assert (placement.prefill, placement.reason) == (None, "short")
    assert chosen(prompt(127), [P0, D0], min_tokens=127).reason == "split"


def test_auto_counts_only_tokens_that_neither_the_node_nor_the_store_holds() -> None:
    cached = replace(D0, cached_chunks=25)
    assert chosen(prompt(512), [P0, cached]).reason == "short"
    assert chosen(prompt(512, stored=25), [P0, D0]).reason == "short"
    assert chosen(prompt(512, stored=23), [P0, D0]).reason == "split"


def test_a_missing_chunk_in_mid_prefix_is_computed_and_the_rest_still_fetched() -> None:
    facts = replace(prompt(512), stored=tuple(index != 3 for index in range(32)))
    assert chosen(facts, [D0]).uncached == CHUNK


def test_auto_does_not_split_when_it_costs_more_than_the_slack() -> None:
    busy = replace(P0, queued_tokens=2000)
    assert chosen(prompt(512), [busy, D0]).reason == "costly"
    assert chosen(prompt(512), [busy, D0], slack_ms=3000.0).reason == "split"


def test_auto_splits_to_spare_decoding_sequences_a_prefill() -> None:
    queued = replace(P0, queued_tokens=2000)
    decoding = replace(D0, sequences=8)
    assert chosen(prompt(512), [queued, decoding]).reason == "split"


@pytest.mark.parametrize("handoff", ["auto", "always"])
def test_requests_are_not_split_while_the_store_is_down(handoff: str) -> None:
    placement = chosen(prompt(512, store_up=False), [P0, D0], handoff=handoff)
    assert (placement.prefill, placement.reason) == (None, "store_down")


@pytest.mark.parametrize("handoff", ["auto", "always"])
@pytest.mark.parametrize("health", ["down", "none"])
def test_only_nodes_that_reach_the_store_are_paired(handoff: str, health: Any) -> None:
    no_store_p, no_store_d = replace(P0, store=health), replace(D0, store=health)
    for nodes in ([no_store_p, D0], [P0, no_store_d], [no_store_p, no_store_d]):
        alone = chosen(prompt(512), nodes, handoff=handoff)
        assert (alone.prefill, alone.decode, alone.reason) == (None, "d0", "store_down")
    for seed in range(10):
        pair = chosen(prompt(512), [no_store_p, P1, no_store_d, D1], seed, handoff=handoff)
        assert (pair.prefill, pair.decode) == ("p1", "d1")


@pytest.mark.parametrize("handoff", ["auto", "always", "never"])
def test_resumed_requests_and_requests_for_prompt_logprobs_are_not_split(
    handoff: str,
) -> None:
    resumed = chosen(prompt(512, resumed=True), [P0, D0], handoff=handoff)
    assert (resumed.prefill, resumed.decode, resumed.reason) == (None, "d0", "resumed")
    logprobs = chosen(prompt(512, prompt_logprobs=True), [P0, D0], handoff=handoff)
    assert (logprobs.prefill, logprobs.decode, logprobs.reason) == (None, "d0", "prompt_logprobs")


@pytest.mark.parametrize("policy", ["queue", "fail"])
def test_without_aggregation_every_request_needs_a_decode_node(policy: Any) -> None:
    for handoff in ("auto", "always", "never"):
        result = missing(prompt(5), [P0], handoff=handoff, missing_role=policy)
        assert (result.role, result.policy) == ("decode", policy)
        assert result.explanation == f"no decode node is ready, and missing_role is {policy}"


@pytest.mark.parametrize("policy", ["queue", "fail"])
def test_without_aggregation_a_request_to_split_needs_a_prefill_node(policy: Any) -> None:
    assert missing(prompt(512), [D0], missing_role=policy).role == "prefill"
    assert missing(prompt(5), [D0], missing_role=policy, handoff="always").role == "prefill"
    unsplit = [
        (prompt(5), D0, "auto"),
        (prompt(512), D0, "never"),
        (prompt(512, store_up=False), D0, "auto"),
        (prompt(512), replace(D0, store="none"), "auto"),
        (prompt(512, resumed=True), D0, "always"),
        (prompt(512, prompt_logprobs=True), D0, "always"),
    ]
    for facts, node, handoff in unsplit:
        assert chosen(facts, [node], missing_role=policy, handoff=handoff).decode == "d0"


def test_always_splits_prompts_of_any_length_and_never_splits_none() -> None:
    for tokens in (1, 5, 600):
        always = chosen(prompt(tokens), [P0, D0], handoff="always")
        assert (always.prefill, always.decode) == ("p0", "d0")
        assert chosen(prompt(tokens), [P0, D0], handoff="never").prefill is None


def test_nodes_of_one_role_do_everything_if_the_other_role_has_no_ready_node() -> None:
    for handoff in ("auto", "always", "never"):
        alone = chosen(prompt(512), [P0], handoff=handoff)
        assert (alone.prefill, alone.decode, alone.reason) == (None, "p0", "no_decode")
    alone = chosen(prompt(512), [D0], handoff="always")
    assert (alone.prefill, alone.decode, alone.reason) == (None, "d0", "no_prefill")


def test_ties_spread_over_all_pairs() -> None:
    rng = random.Random(5)
    counts: Counter[tuple[str | None, str]] = Counter()
    for _ in range(800):
        placement = place_among(prompt(512), [P0, P1, D0, D1], PlacementPolicy(), rng)
        assert isinstance(placement, Placement)
        counts[(placement.prefill, placement.decode)] += 1
    assert len(counts) == 4
    assert min(counts.values()) > 140  # expected 200, standard deviation 12


def test_a_queue_repels_requests_and_a_cached_prefix_attracts_them() -> None:
    queued = replace(P0, queued_tokens=300)
    assert all(chosen(prompt(512), [queued, P1, D0], s).prefill == "p1" for s in range(20))
    warm = replace(D1, cached_chunks=30)
    assert all(chosen(prompt(512), [D0, warm], s).decode == "d1" for s in range(20))
    # A short queue does not outweigh a long prefix; a long one does.
    assert chosen(prompt(512), [D0, replace(warm, queued_tokens=100)]).decode == "d1"
    assert chosen(prompt(512), [D0, replace(warm, queued_tokens=900)]).decode == "d0"


def test_the_only_idle_pair_of_a_large_pool_is_found() -> None:
    prefills = [node(f"p{n}", "prefill", queued_tokens=5000) for n in range(3 * PAIRED)]
    decodes = [node(f"d{n}", "decode", sequences=50) for n in range(3 * PAIRED)]
    placement = chosen(prompt(512), [*prefills, P1, *decodes, D1])
    assert (placement.prefill, placement.decode) == ("p1", "d1")


SLOW = [{"get_bytes_per_s": 1e3}, {"get_latency_ms": 512.0}]


@pytest.mark.parametrize("slow", SLOW)
def test_chunks_of_a_slow_store_are_recomputed_and_booked_as_uncached(
    slow: dict[str, float],
) -> None:
    node = replace(D0, speeds=speeds_with(**slow))
    predicted = costs(prompt(512, stored=32), node)
    assert (predicted.alone_ms[0], predicted.uncached[0]) == (512.0, 512)
    assert chosen(prompt(512, stored=32), [node]).uncached == 512


def test_fetching_costs_the_latency_plus_the_transfer_time() -> None:
    bytes_ms = 1000 * 32 * (1 << 20) / 1e9
    assert costs(prompt(512, stored=32), D0).prefill_ms[0] == pytest.approx(1.0 + bytes_ms)
    far = replace(D0, speeds=speeds_with(get_latency_ms=30.0))
    assert costs(prompt(512, stored=32), far).prefill_ms[0] == pytest.approx(30.0 + bytes_ms)
    assert costs(prompt(512), far).prefill_ms[0] == 512.0  # nothing to fetch


def test_a_hand_off_adds_the_decode_node_s_latency_unless_it_has_all_chunks() -> None:
    far = replace(D0, speeds=speeds_with(get_latency_ms=31.0))
    facts = prompt(512)
    assert pair_ms(facts, P0, far) - pair_ms(facts, P0, D0) == pytest.approx(30.0)
    warm, warm_far = (replace(candidate, cached_chunks=32) for candidate in (D0, far))
    assert pair_ms(facts, P0, warm) == pair_ms(facts, P0, warm_far)


def test_the_explanation_compares_fetching_stored_chunks_with_computing_them() -> None:
    why = chosen(prompt(512, stored=12), [D0], handoff="never").explanation
    assert why == (
        "uncached 320 of 512 tokens, 333.6 ms; store has 12 chunks: fetch 13.6 ms, compute"
        " 192.0 ms; hand-off is off"
    )
    lacking = replace(D0, cached_chunks=11)
    why = chosen(prompt(512, stored=12), [lacking], handoff="never").explanation
    assert "; store has 1 chunk: fetch 2.0 ms, compute 16.0 ms; " in why
    # If a prefill node computes the prompt, the explanation counts the chunks that it lacks.
    pair = chosen(prompt(512, stored=12), [P0, replace(D0, cached_chunks=12)], handoff="always")
    assert "; store has 12 chunks: fetch 13.6 ms, compute 192.0 ms; " in pair.explanation


@pytest.mark.parametrize(
    ("facts", "node"),
    [
        (prompt(512), D0),
        (prompt(512, stored=12), replace(D0, cached_chunks=12)),
        (prompt(512, stored=12), replace(D0, store="down")),
    ],
)
def test_the_explanation_omits_the_store_if_there_is_nothing_to_fetch(
    facts: RequestFacts, node: Candidate
) -> None:
    assert "store" not in chosen(facts, [node], handoff="never").explanation


def speeds_with(**changes: float) -> Speeds:
    names = SPEEDS.__struct_fields__
    return Speeds(**({name: getattr(SPEEDS, name) for name in names} | changes))


def test_unmeasured_speeds_are_the_median_of_the_measured_ones_or_the_fallback() -> None:
    unmeasured = replace(D0, speeds=Speeds())
    assert filled([unmeasured])[0].speeds == FALLBACK
    fast = replace(D1, speeds=speeds_with(prefill_tokens_per_s=9000.0))
    assert [candidate.speeds for candidate in filled([unmeasured, fast])] == [
        fast.speeds,
        fast.speeds,
    ]
    faster = replace(P0, speeds=speeds_with(prefill_tokens_per_s=11000.0))
    prefills, decodes = fill_group_speeds([group_of([faster]), group_of([unmeasured, fast])])
    assert list(decodes.prefill_tokens_per_s) == [10000.0, 9000.0]
    assert list(prefills.prefill_tokens_per_s) == [11000.0]


speeds = st.builds(
    Speeds,
    prefill_tokens_per_s=st.sampled_from([0.0, 100.0, 5000.0]),
    decode_step_ms=st.sampled_from([0.0, 5.0, 50.0]),
    put_bytes_per_s=st.sampled_from([0.0, 1e6, 1e9]),
    get_bytes_per_s=st.sampled_from([0.0, 1e6, 1e9]),
    get_latency_ms=st.sampled_from([0.0, 0.1, 50.0]),
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[RequestFacts, list[Candidate]]:
    tokens = draw(st.integers(1, 700))
    chunks = tokens // CHUNK
    facts = RequestFacts(
        prompt_tokens=tokens,
        chunk_tokens=CHUNK,
        chunk_bytes=draw(st.sampled_from([1 << 10, 1 << 20])),
        stored=tuple(draw(st.lists(st.booleans(), min_size=chunks, max_size=chunks))),
        sequences=draw(st.integers(1, 4)),
        store_up=draw(st.booleans()),
    )
    either: list[Role] = ["prefill", "decode"]
    roles = draw(st.lists(st.sampled_from(either), min_size=1, max_size=6))
    nodes = [
        Candidate(
            node=NodeId(f"n{index}"),
            role=role,
            queued_tokens=draw(st.integers(0, 3000)),
            sequences=draw(st.integers(0, 20)),
            speeds=draw(speeds),
            cached_chunks=draw(st.integers(0, chunks)),
        )
        for index, role in enumerate(roles)
    ]
    return facts, nodes


@given(situation=situations(), handoff=st.sampled_from(["auto", "always", "never"]))
def test_the_placement_is_the_cheapest_of_its_kind_within_a_tie(
    situation: tuple[RequestFacts, list[Candidate]], handoff: Any
) -> None:
    facts, nodes = situation
    placement = chosen(facts, nodes, handoff=handoff)
    roles = {candidate.node: candidate.role for candidate in nodes}
    decodes = [candidate for candidate in filled(nodes) if candidate.role == "decode"]
    prefills = [candidate for candidate in filled(nodes) if candidate.role == "prefill"]
    if placement.prefill is None:
        eligible = decodes or prefills
        lowest = costs(facts, *eligible).alone_ms.min()
        assert roles[placement.decode] == eligible[0].role
    else:
        lowest = pairs_ms(facts, prefills, decodes).min()
        assert (roles[placement.prefill], roles[placement.decode]) == ("prefill", "decode")
    assert placement.predicted_ms <= lowest * (1 + TIE_SHARE) + TIE_MS + 1e-6
    assert 0 <= placement.uncached <= facts.prompt_tokens
    both = bool(prefills and decodes)
    if handoff != "auto":
        always = handoff == "always" and facts.store_up
        assert (placement.prefill is not None) == (both and always)


@given(situation=situations())
def test_costs_are_finite_and_never_negative(
    situation: tuple[RequestFacts, list[Candidate]],
) -> None:
    facts, nodes = situation
    every = filled(nodes)
    predicted = [*costs(facts, *every).alone_ms, *pairs_ms(facts, every, every).ravel()]
    assert all(0 <= cost < 1e12 for cost in predicted)


@given(situation=situations(), more=st.integers(1, 5000))
def test_a_longer_queue_never_makes_a_node_cheaper(
    situation: tuple[RequestFacts, list[Candidate]], more: int
) -> None:
    facts, nodes = situation
    first = filled(nodes)[0]
    longer = replace(first, queued_tokens=first.queued_tokens + more)
    assert pair_ms(facts, longer, first) > pair_ms(facts, first, first)


@pytest.mark.parametrize("missing_role", ["aggregate", "queue", "fail"])
def test_a_vector_is_made_on_the_cheapest_node_whatever_its_role(missing_role: Any) -> None:
    facts = prompt(400, pooling=True)
    idle, busy = node("p", "prefill"), node("d", "decode", queued_tokens=1000)
    for nodes in ([idle, busy], [idle]):
        placement = chosen(facts, nodes, missing_role=missing_role, handoff="always")
        assert (placement.decode, placement.prefill) == ("p", None)
        assert (placement.reason, placement.uncached) == ("pooling", 400)
    assert missing(facts, [], missing_role=missing_role).role == "decode"
