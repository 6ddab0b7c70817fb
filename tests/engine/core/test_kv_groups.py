"""Groups of layers in the engine: what a sequence holds, what a reservation computes, and what the
step loop may still hold. On the sim, whose ids depend on every byte of KV that a token sees."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Reservation
from baton_engine.kv.block_pool import hash_in
from baton_protocol.errors import PromptTooLong
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.layout import KVGroup
from baton_protocol.request import Request
from tests.support.engines.engine_core import Run, drive, make_request, run_all, step_once
from tests.support.engines.landing import BLOCK, GROUPS, content, land, sim, watched_sim

ONE, MIXED = (KVGroup((0,), 10),), (KVGroup((0,)), KVGroup((1,), 10), KVGroup((2,), 10))
WINDOWED = [groups for groups in (*GROUPS, ONE, MIXED) if groups]


def engine_of(groups: tuple[KVGroup, ...], **changes: Any) -> EngineCore:
    settings: dict[str, Any] = {"groups": groups, "max_model_len": 200}
    return watched_sim(**settings | changes)[0]


def held(engine: EngineCore) -> int:
    load = engine.load()
    return load.total_blocks - load.free_blocks


def reserve(engine: EngineCore, request: Request) -> Reservation:
    reservation = engine.reserve(request)
    assert reservation is not None
    return reservation


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("groups", WINDOWED)
def test_a_decoding_sequence_holds_only_the_blocks_of_the_last_window(
    groups: tuple[KVGroup, ...], budget: int, overlap: bool
) -> None:
    """The KV of a window model in memory, counted: the prompt is many windows long."""
    engine = engine_of(groups, max_batched_tokens=budget, overlap=overlap)
    layout, request = engine.info.layout, make_request("a", 100, max_tokens=60)
    assert layout.window is not None
    windowed = layout.num_groups - layout.num_full_groups
    # The spans of a window, and those of a chunk at each end: only whole chunks are released.
    most = windowed * (-(-layout.window // BLOCK) + 1 + 2 * (layout.chunk_blocks - 1))
    engine.submit(request)
    run, counts = Run(), []
    while engine.has_work():
        step_once(engine, run)
        known = 100 + len(run.tokens)
        if len(run.tokens) > 1 and engine.has_work():
            spans = -(-(known + overlap) // BLOCK)
            counts.append(held(engine) - layout.num_full_groups * spans)
    assert max(counts) <= most
    assert len(counts) > 50
    assert run.ids("a") == run_all(sim(groups=groups, max_model_len=200), [request]).ids("a")


@pytest.mark.parametrize("groups", WINDOWED)
def test_a_request_reuses_a_prefix_that_ends_before_the_window_of_the_first_one(
    groups: tuple[KVGroup, ...],
) -> None:
    engine = engine_of(groups)
    prompt = make_request("a", 100).prompt_ids
    run_all(engine, [make_request("a", prompt)])
    again = make_request("b", prompt[:41])
    alone = run_all(sim(groups=groups, max_model_len=200), [again])
    run = run_all(engine, [again])
    assert run.use("b") == (40, 0, 1)
    assert run.ids("b") == alone.ids("b")


def test_a_reservation_lists_no_blocks_that_the_window_has_left() -> None:
    engine = engine_of(MIXED)
    prompt = make_request("a", 41).prompt_ids
    run_all(engine, [make_request("a", prompt, max_tokens=1)])
    reservation = reserve(engine, make_request("b", prompt))
    assert reservation.cached == 10
    missing = {index for index, block in enumerate(reservation.blocks) if not block}
    # The token at 40 sees those from 31 on, in span 7.
    assert missing == {span * 3 + group for span in range(7) for group in (1, 2)}
    engine.check_integrity()
    engine.release(reservation)
    engine.check_integrity()
    assert held(engine) == 0


@pytest.mark.parametrize(
    ("windowed", "work", "blocks"),
    [
        # All 10 spans landed, and the last token is computed. It sees spans 7 to 10, and span 6 is
        # in the same chunk as span 7.
        (range(10), [(40, 1)], 11 + 2 * 5),
        (range(7, 10), [(40, 1)], 11 + 2 * 4),
        # Span 7 is computed again, from spans 4 to 6.
        ({4, 5, 6, 8, 9}, [(28, 4), (40, 1)], 11 + 2 * 7),
        # Spans 7 to 0 are computed, because each needs those before it.
        ({8, 9}, [(0, 32), (40, 1)], 11 + 2 * 11),
        ((), [(0, 41)], 11 + 2 * 11),
    ],
)
def test_spans_that_landed_without_windowed_kv_are_computed_only_if_they_are_seen(
    windowed: set[int], work: list[tuple[int, int]], blocks: int
) -> None:
    donor = sim(groups=MIXED, max_model_len=200)
    request = make_request("a", 41)
    expected = run_all(donor, [request]).ids("a")
    engine, runner = watched_sim(groups=MIXED, max_model_len=200)
    reservation = reserve(engine, request)
    assert held(engine) == 11 * 3
    found = land(engine, reservation, donor, range(10), windowed)
    engine.submit(
        request,
        reservation=reservation,
        landed=found.landed,
        window_landed=found.window_landed,
    )
    engine.check_integrity()
    assert held(engine) == blocks
    run = drive(engine)
    assert [row for [row] in runner.steps][: len(work)] == work
    assert run.ids("a") == expected


def test_blocks_of_spans_that_landed_without_windowed_kv_are_released_and_not_cached() -> None:
    donor = sim(groups=MIXED, max_model_len=200)
    request = make_request("a", 41)
    run_all(donor, [request])
    engine, runner = watched_sim(groups=MIXED, max_model_len=200)
    reservation = reserve(engine, request)
    found = land(engine, reservation, donor, range(1, 10), {7, 8, 9})
    engine.submit(
        request,
        reservation=reservation,
        landed=found.landed,
        window_landed=found.window_landed,
    )
    assert held(engine) == 11 + 2 * 5  # without spans 1 to 6 in the groups with a window
    for group in (1, 2):
        keys = [hash_in(group, hash) for hash in reservation.hashes]
        cached = [span for span, key in enumerate(keys) if engine._pool.lookup([key])]
        assert cached == [7, 8, 9]
    drive(engine)
    assert runner.steps[:2] == [[(0, 4)], [(40, 1)]]


@pytest.mark.parametrize("known", [39, 40, 41])
def test_a_whole_prompt_in_the_cache_is_reused_up_to_its_last_span(known: int) -> None:
    engine, runner = watched_sim(groups=MIXED, max_model_len=200)
    request = make_request("a", known)
    expected = run_all(engine, [request]).ids("a")
    again = make_request("b", request.prompt_ids)
    engine.submit(again, reservation=reserve(engine, again))
    runner.steps.clear()
    assert drive(engine).ids("b") == expected
    start = (known - 1) // BLOCK * BLOCK
    assert runner.steps[0] == [(start, known - start)]


def test_blocks_that_a_window_leaves_stay_referenced_until_the_next_step() -> None:
    request = make_request("a", 64, max_tokens=2)
    donor = sim(groups=MIXED, max_model_len=200)
    run_all(donor, [request])
    engine, run = engine_of(MIXED, max_batched_tokens=32), Run()
    engine.submit(request, track=True, report_filled=True)
    result = step_once(engine, run)
    (progress,) = result.progress
    assert progress.computed == 32
    assert 0 not in progress.blocks
    assert held(engine) == 16 * 3

    names = engine.block_hashes(request)
    assert [chunk.index for chunk in result.filled] == [0, 1, 2, 3]
    for chunk in result.filled:
        spans = (2 * chunk.index, 2 * chunk.index + 1)
        keys = [hash_in(group, names[span]) for group in range(3) for span in spans]
        source = [block for key in keys for block in donor._pool.lookup([key])]
        assert content(engine, chunk.blocks) == content(donor, source)

    (progress,) = step_once(engine, run).progress
    # The token at 32 sees those from 23 on, in span 5. Spans 4 and 5 are one chunk.
    left = {span * 3 + group for span in range(4) for group in (1, 2)}
    assert {index for index, block in enumerate(progress.blocks) if not block} == left
    assert held(engine) == 16 * 3 - len(left)


def test_the_step_loop_may_hold_and_release_a_list_with_padding() -> None:
    engine = engine_of(MIXED)
    engine.submit(make_request("a", 64, max_tokens=9), track=True)
    run = Run()
    for _ in range(3):
        step_once(engine, run)
    (full,) = run.progress
    blocks = engine._requests.states[RequestId("a")].live[0].blocks
    assert BlockId(0) in blocks
    engine.hold(blocks)
    engine.check_integrity()
    engine.unhold(blocks)
    drive(engine)
    assert held(engine) == 0
    assert full.computed == 64


def test_other_choices_start_from_the_prompts_last_window() -> None:
    request = make_request("a", 61, n=3, temperature=1.0, seed=3, max_tokens=20)
    expected = run_all(sim(groups=MIXED, max_model_len=200), [request]).all_ids()
    engine, runner = watched_sim(groups=MIXED, max_model_len=200)
    assert run_all(engine, [request]).all_ids() == expected
    assert runner.steps[:2] == [[(0, 61)], [(61, 1), (61, 1), (61, 1)]]


def test_a_preempted_sequence_finds_the_blocks_of_its_last_window_in_both_tiers() -> None:
    requests = [make_request(name, 24, max_tokens=40) for name in "abc"]
    expected = {}
    for request in requests:
        expected.update(run_all(sim(groups=MIXED, max_model_len=200), [request]).all_ids())
    engine = engine_of(MIXED, num_blocks=60, host_kv_memory=1 << 20)
    run = run_all(engine, requests)
    load = engine.load()
    assert load.preemptions_total > 0
    assert load.host_loaded_blocks_total > 0
    assert run.all_ids() == expected


def test_the_longest_sequence_fills_the_pool_in_all_groups() -> None:
    engine = engine_of(MIXED, num_blocks=31)
    with pytest.raises(PromptTooLong, match="at most 39 fit"):
        engine.submit(make_request("a", 40))
    run = run_all(engine, [make_request("a", 39, max_tokens=9)])
    assert len(run.ids("a")) == 1
