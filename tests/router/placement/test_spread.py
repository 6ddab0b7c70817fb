"""Sequences of booked placements: bursts spread over the nodes, and cached prefixes attract
requests as far as the predicted costs justify it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from baton_protocol.ids import BlockHash, Epoch, NodeId, RequestId
from baton_protocol.link import CacheEvents, Load
from baton_protocol.store import NodeLoad, Role, Speeds
from baton_router.nodes.pool_view import PoolView
from baton_router.placement.placement import Placement
from baton_router.placement.policy import TIE_MS, TIE_SHARE, PlacementPolicy
from baton_router.requests.placer import Placer
from benchmarks.support.router.placement_pool import in_flight, kind, layout, no_store, report

SHAPE = layout(8)
CHUNKS = tuple(BlockHash(bytes([n]) * 16) for n in range(16))
PROMPT = (1,) * (SHAPE.chunk_tokens * len(CHUNKS) + 1)
PREFILL: Role = "prefill"
DECODE: Role = "decode"
ROLES = [PREFILL] * 4 + [DECODE] * 8
BURST = 64
WARM = NodeId("decode-0")


def make_pool(roles: list[Role], **speeds: float) -> PoolView:
    view = PoolView(lambda: 0.0, max_chunks=1000)
    measured_speeds = Speeds(
        **(
            {
                "prefill_tokens_per_s": 10_000.0,
                "decode_step_ms": 10.0,
                "put_bytes_per_s": 10e9,
                "get_bytes_per_s": 10e9,
                "get_latency_ms": 0.5,
            }
            | speeds
        )
    )
    for number, role in enumerate(roles):
        view.hello(
            report(f"{role}-{number}", role, SHAPE, measured_speeds, NodeLoad())
        ).usable = True
    return view


def cache_prompt(view: PoolView, node: NodeId) -> None:
    view.cache(node, CacheEvents(Epoch("e"), stored=CHUNKS))


def burst(
    view: PoolView, policy: PlacementPolicy, stored: list[bool], count: int = BURST
) -> Iterator[Placement]:
    """Place equal prompts one by one, each booked before the next is placed. Check that each
    placement is the cheapest of its kind within a tie."""
    places = Placer(view, no_store(), policy, random.Random(3))
    for number in range(count):
        request = in_flight(f"r{number}", PROMPT, CHUNKS, kind(SHAPE))
        placement = places.find_placement(request, stored, 0.0)
        assert isinstance(placement, Placement)
        split = bool(placement.prefill)
        same_kind = [option for option in placement.considered if bool(option.prefill) == split]
        best = same_kind[0].predicted_ms
        assert placement.predicted_ms <= best * (1 + TIE_SHARE) + TIE_MS + 1e-6
        places.book_placement(request, placement)
        yield placement


NOT_STORED, STORED = [False] * len(CHUNKS), [True] * len(CHUNKS)


# If every chunk is fetched, a prompt adds 0.1 ms to a queue, and costs within 0.6 ms are a tie.
@pytest.mark.parametrize(("stored", "spread"), [(NOT_STORED, 2), (STORED, 7)])
def test_a_burst_of_equal_prompts_spreads_evenly_over_the_nodes(
    stored: list[bool], spread: int
) -> None:
    view = make_pool(ROLES)
    placements = list(burst(view, PlacementPolicy(handoff="always"), stored))
    prefills = Counter(placement.prefill for placement in placements)
    decodes = Counter(placement.decode for placement in placements)
    assert len(prefills) == 4
    assert max(prefills.values()) - min(prefills.values()) <= spread
    assert len(decodes) == 8
    assert max(decodes.values()) <= 3 * BURST / 8


def test_predicted_costs_grow_with_the_bookings_of_a_burst() -> None:
    view = make_pool(ROLES[4:8])
    predicted_ms = [
        placement.predicted_ms for placement in burst(view, PlacementPolicy(), NOT_STORED)
    ]
    assert predicted_ms[-1] > 3 * predicted_ms[0]
    queues = [node.queued_tokens for node in view.nodes.values()]
    assert max(queues) - min(queues) <= len(PROMPT)  # queues differ by at most one prompt


def test_a_prefix_attracts_requests_until_a_cold_node_is_cheaper() -> None:
    view = make_pool(ROLES[4:8])
    cache_prompt(view, WARM)
    decodes = [
        placement.decode for placement in burst(view, PlacementPolicy(), NOT_STORED, count=400)
    ]
    first = next(n for n, node in enumerate(decodes) if node != WARM)
    # Cold node: 2,049 tokens at 10 tokens per ms. Warm node, per sequence: 0.5 ms slowdown of its
    # 10 ms steps, and 0.1 ms twice for the one uncached token: in the queue and as a stall.
    assert first == pytest.approx(205 / 0.7, rel=0.1)
    assert len(set(decodes[first:])) > 1


def test_a_hot_prefix_spreads_sooner_by_fetching_than_by_computing() -> None:
    computing, fetching = (make_pool(ROLES[4:8]) for _ in range(2))
    first_cold = []
    for view, stored in ((computing, NOT_STORED), (fetching, STORED)):
        cache_prompt(view, WARM)
        decodes = [
            placement.decode for placement in burst(view, PlacementPolicy(), stored, count=400)
        ]
        first_cold.append(next(n for n, node in enumerate(decodes) if node != WARM))
        counts = Counter(decodes)
        assert counts[WARM] < 400
    assert first_cold[1] < first_cold[0] / 4
    assert max(Counter(decodes).values()) < 200  # no herd on the only warm node


def test_a_warm_node_gets_the_request_until_its_queue_outweighs_the_prefix() -> None:
    view = make_pool(ROLES[4:6])
    cache_prompt(view, WARM)
    queued, speeds = 0, view.nodes[WARM].report.speeds
    for queued in range(0, 4000, 100):
        load = NodeLoad(queued_tokens=queued)
        view.load(WARM, Load(Epoch("e"), "ready", speeds, load))
        [placement] = burst(view, PlacementPolicy(), NOT_STORED, count=1)
        view.release(placement.decode, RequestId("r0"))
        if placement.decode != WARM:
            break
    assert queued == pytest.approx(SHAPE.chunk_tokens * len(CHUNKS), abs=150)
