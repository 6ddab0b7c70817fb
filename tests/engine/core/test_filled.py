"""Filled reports: each chunk that a step completes is reported once. Also full_chunks(), which
lists all full chunks of a request."""

from __future__ import annotations

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Filled
from baton_protocol.hashing import chunk_hashes
from baton_protocol.ids import BlockHash, RequestId
from tests.support.engines.engine_core import Run, drive, make_request, run_all, scripted, step_once

A = RequestId("a")


def chunk_names(engine: EngineCore, tokens: list[int]) -> list[BlockHash]:
    """The hashes of the chunks of 8 tokens."""
    return chunk_hashes(engine.block_hashes(make_request("names", tokens)), 2)


def indexes(filled: tuple[Filled, ...] | list[Filled]) -> list[tuple[int, int]]:
    """(choice, chunk index) of each report."""
    return [(each.choice, each.index) for each in filled]


def test_chunks_of_the_prompt_and_the_outputs_are_reported_when_they_are_full() -> None:
    engine, _ = scripted(max_batched_tokens=12)
    request = make_request("a", 21, max_tokens=13)
    engine.submit(request, report_filled=True)
    run = drive(engine)
    # The last output token has no KV, so it completes no chunk.
    by_step = [indexes(step.filled) for step in run.steps if step.filled]
    assert by_step == [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 3)]]
    tokens = [*request.prompt_ids, *run.ids("a")]
    assert [each.hash for each in run.filled] == chunk_names(engine, tokens)[:4]
    assert [each.blocks for each in run.filled][:2] == [(1, 2), (3, 4)]


def test_chunks_are_reported_only_with_report_filled() -> None:
    engine, _ = scripted()
    assert run_all(engine, [make_request("a", 30)]).filled == []


def test_only_chunks_with_computed_blocks_are_reported() -> None:
    engine, _ = scripted()
    request = make_request("a", 40, max_tokens=1)
    run_all(engine, [make_request("head", request.prompt_ids[:12], max_tokens=1)])
    reservation = engine.reserve(request)
    assert reservation is not None
    assert reservation.cached == 3
    landed = [(5, 8)]
    engine.submit(request, reservation=reservation, landed=landed, report_filled=True)
    # Chunk 0 is cached, 1 half cached, 2 half landed, 3 landed, 4 computed.
    assert indexes(drive(engine).filled) == [(0, 1), (0, 2), (0, 4)]


def test_prompt_chunks_are_reported_for_the_leader_and_output_chunks_for_each_choice() -> None:
    engine, _ = scripted()
    request = make_request("a", 14, n=3, max_tokens=12)
    engine.submit(request, report_filled=True)
    run = drive(engine)
    assert sorted(indexes(run.filled)) == [(0, 0), *((c, i) for c in range(3) for i in (1, 2))]
    for choice in range(3):
        tokens = [*request.prompt_ids, *run.ids("a", choice)]
        mine = [each.hash for each in run.filled if each.choice == choice]
        assert mine == chunk_names(engine, tokens)[1 if choice else 0 : 3]


def test_a_chunk_that_is_computed_again_after_preemption_is_not_reported_again() -> None:
    engine, _ = scripted(num_blocks=9, max_batched_tokens=9)
    for name in "ab":
        engine.submit(make_request(name, 15, max_tokens=12), report_filled=True)
    run = drive(engine)
    assert engine.load().preemptions_total > 0
    for name in "ab":
        mine = [each.index for each in run.filled if each.request == name]
        assert mine == [0, 1, 2]


def test_the_next_leader_does_not_report_the_old_leaders_chunks_again() -> None:
    engine, _ = scripted(max_batched_tokens=9, num_blocks=6)
    run = Run()
    engine.submit(make_request("a", 20, n=2, max_tokens=2), report_filled=True)
    step_once(engine, run)
    assert indexes(run.filled) == [(0, 0)]
    engine.finish_choice(A, 0)
    parked = engine.reserve(make_request("parked", 24))
    assert parked is not None  # this evicts the blocks that the first leader filled
    engine.release(parked)
    drive(engine, into=run)
    assert run.steps[1].num_tokens == 9
    assert indexes(run.filled) == [(0, 0), (1, 1)]


def test_filled_blocks_of_a_finished_request_can_be_held_until_the_next_step() -> None:
    engine, _ = scripted(num_blocks=4)
    run = Run()
    engine.submit(make_request("a", 16, max_tokens=1), report_filled=True)
    step_once(engine, run)
    assert run.finished == ["a"]
    assert engine.reserve(make_request("b", 4)) is None
    for filled in run.filled:
        engine.hold(filled.blocks)
    drive(engine, into=run)
    assert engine.load().free_blocks == 0
    for filled in run.filled:
        engine.unhold(filled.blocks)
    engine.check_integrity()
    assert engine.load().free_blocks == engine.load().cached_blocks == 4


def test_full_chunks_lists_each_full_chunk_of_a_running_request_once() -> None:
    engine, _ = scripted()
    run = Run()
    request = make_request("a", 20, n=2, max_tokens=12)
    engine.submit(request)
    for _ in range(6):
        step_once(engine, run)
    chunks = engine.full_chunks(A)
    assert sorted(indexes(chunks)) == [(0, 0), (0, 1), (0, 2), (1, 2)]
    for each in chunks:
        tokens = [*request.prompt_ids, *run.ids("a", each.choice)]
        assert each.hash == chunk_names(engine, tokens)[each.index]
        engine.hold(each.blocks)
    engine.abort(A)
    for each in chunks:
        engine.unhold(each.blocks)
    engine.check_integrity()
    assert engine.full_chunks(A) == ()


def test_full_chunks_includes_landed_chunks_only_after_the_hole_before_them_is_computed() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    request = make_request("a", 30, max_tokens=1)
    reservation = engine.reserve(request)
    assert reservation is not None
    engine.submit(request, reservation=reservation, landed=[(0, 2), (3, 6)])
    assert indexes(engine.full_chunks(A)) == [(0, 0)]
    engine.step()
    assert indexes(engine.full_chunks(A)) == [(0, 0), (0, 1), (0, 2)]
