"""Reservations: blocks that a request holds before it runs, landed KV, and what remains to
compute."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Reservation
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from tests.support.engines.engine_core import (
    EOS,
    Run,
    drive,
    make_request,
    run_all,
    scripted,
    step_once,
)


def reserve(engine: EngineCore, request: Request) -> Reservation:
    reservation = engine.reserve(request)
    assert reservation is not None
    engine.check_integrity()
    return reservation


def test_a_reservation_holds_blocks_for_the_whole_prompt() -> None:
    engine, _ = scripted()
    request = make_request("a", 10)
    reservation = reserve(engine, request)
    assert (reservation.blocks, reservation.cached) == ((1, 2, 3), 0)
    assert reservation.hashes == engine.block_hashes(request)
    assert engine.load().free_blocks == 13
    assert not engine.has_work()
    engine.release(reservation)
    engine.release(reservation)
    engine.check_integrity()
    assert engine.load().free_blocks == 16


def test_a_reservation_starts_with_the_cached_blocks_even_if_all_are_cached() -> None:
    engine, _ = scripted()
    first = make_request("a", 8, max_tokens=1)
    run_all(engine, [first])
    reservation = reserve(engine, make_request("b", first.prompt_ids))
    assert (reservation.blocks, reservation.cached) == ((1, 2), 2)
    assert engine.load().free_blocks == 14
    engine.release(reservation)
    assert engine.cached_blocks(reservation.hashes) == 2


def test_a_request_has_one_reservation_at_a_time() -> None:
    engine, _ = scripted()
    reserve(engine, make_request("a", 4))
    with pytest.raises(ValueError, match="has a reservation already"):
        engine.reserve(make_request("a", 4))


def test_reserve_returns_none_and_changes_nothing_without_enough_free_blocks() -> None:
    engine, _ = scripted(num_blocks=3)
    reserve(engine, make_request("a", 8))
    assert engine.reserve(make_request("b", 8)) is None
    engine.check_integrity()
    assert engine.load().free_blocks == 1


def test_reserve_returns_none_while_a_waiting_request_needs_the_free_blocks() -> None:
    engine, _ = scripted(num_blocks=5)
    parked = reserve(engine, make_request("parked", 8))
    engine.submit(make_request("big", 16))
    engine.step()
    assert engine.starved()
    assert engine.reserve(make_request("small", 4)) is None
    engine.release(parked)
    run = drive(engine)
    assert run.finished == ["big"]
    assert not engine.starved()
    assert engine.reserve(make_request("small", 4)) is not None


def test_a_reservation_leaves_a_watermark_for_running_requests() -> None:
    engine, _ = scripted(num_blocks=200, max_model_len=1000, max_batched_tokens=1000)
    engine.submit(make_request("a", 4, max_tokens=2))
    engine.step()
    assert engine.reserve(make_request("b", 4 * 198)) is None
    drive(engine)
    assert engine.reserve(make_request("b", 4 * 198)) is not None


def test_an_aborted_request_no_longer_claims_free_blocks() -> None:
    engine, _ = scripted(num_blocks=5)
    reserve(engine, make_request("parked", 8))
    engine.submit(make_request("big", 16))
    engine.step()
    engine.abort(RequestId("big"))
    assert not engine.has_work()
    assert engine.reserve(make_request("small", 4)) is not None


def test_landed_blocks_are_not_computed_and_the_next_request_reuses_them() -> None:
    engine, runner = scripted()
    request = make_request("a", 14, max_tokens=1)
    engine.submit(request, reservation=reserve(engine, request), landed=[(0, 3)])
    engine.check_integrity()
    assert engine.cached_blocks(engine.block_hashes(request)) == 3
    assert engine.cache_changes().stored == (engine.block_hashes(request)[1],)
    run = drive(engine)
    assert runner.work() == [[(12, 2)]]
    assert run.use("a") == (0, 12, 2)
    again = run_all(engine, [make_request("b", request.prompt_ids, max_tokens=1)])
    assert again.use("b") == (12, 0, 2)


def test_cached_and_landed_tokens_are_counted_separately() -> None:
    engine, _ = scripted()
    request = make_request("a", 17)
    run_all(engine, [make_request("first", request.prompt_ids[:4], max_tokens=1)])
    reservation = reserve(engine, request)
    assert reservation.cached == 1
    engine.submit(request, reservation=reservation, landed=[(0, 3)])
    assert drive(engine).use("a") == (4, 8, 5)


def test_cached_blocks_of_a_reservation_are_used_even_if_nothing_landed() -> None:
    engine, _ = scripted()
    request = make_request("a", 17)
    run_all(engine, [make_request("first", request.prompt_ids, max_tokens=1)])
    engine.submit(request, reservation=reserve(engine, request))
    assert drive(engine).use("a") == (16, 0, 1)


def test_a_fully_landed_prompt_computes_its_last_token_in_an_unshared_block() -> None:
    engine, runner = scripted()
    request = make_request("a", 8, max_tokens=2)
    engine.submit(request, reservation=reserve(engine, request), landed=[(0, 2)])
    # The last block is not shared, because the request still writes into it.
    assert engine.cached_blocks(engine.block_hashes(request)) == 1
    run = drive(engine)
    assert runner.work()[0] == [(7, 1)]
    assert run.use("a") == (0, 7, 1)
    assert run.ids("a") == [8, 9]
    assert engine.cached_blocks(engine.block_hashes(request)) == 2


@pytest.mark.parametrize("length", [4, 8])
def test_a_fully_cached_prompt_does_not_write_into_the_shared_block(length: int) -> None:
    engine, runner = scripted()
    request = make_request("a", length, max_tokens=2)
    run_all(engine, [make_request("first", request.prompt_ids, max_tokens=1)])
    runner.steps.clear()
    reservation = reserve(engine, request)
    engine.submit(request, reservation=reservation, landed=[(0, length // 4)])
    run = drive(engine)
    assert runner.work()[0] == [(length - 4, 4)]
    assert runner.steps[0][0].blocks[-1] != reservation.blocks[-1]
    assert run.use("a") == (length - 4, 0, 4)


def test_with_a_known_output_token_the_whole_prompt_may_have_landed() -> None:
    engine, runner = scripted()
    request = make_request("a", 8, max_tokens=3)
    reservation = reserve(engine, request)
    with_output = make_request("a", 8, ((50,),), max_tokens=3)
    engine.submit(with_output, reservation=reservation, landed=[(0, 2)])
    run = drive(engine)
    assert runner.work() == [[(8, 1)], [(9, 1)]]
    assert run.use("a") == (0, 8, 0)
    assert [(token.offset, token.id) for token in run.tokens] == [(1, 9), (2, 10)]


def test_choices_share_landed_blocks() -> None:
    engine, runner = scripted()
    request = make_request("a", 10, n=2)
    reservation = reserve(engine, request)
    known = make_request("a", 10, ((50,), (51,)), n=2)
    engine.submit(known, reservation=reservation, landed=[(0, 2)])
    run = drive(engine)
    assert [work for step in runner.work()[:2] for work in step] == [(8, 3), (11, 1), (10, 1)]
    assert run.use("a") == (0, 8, 2)
    assert run.ids("a", 1) == [21, 22, 23]


def test_a_reservation_is_released_if_all_choices_are_submitted_as_finished() -> None:
    engine, _ = scripted()
    request = make_request("a", 10, ((1,),))
    engine.submit(request, reservation=reserve(engine, request), landed=[(0, 2)], finished=(0,))
    engine.check_integrity()
    assert engine.load().free_blocks == 16
    assert drive(engine).finished == ["a"]


def test_if_submit_raises_the_caller_keeps_the_reservation() -> None:
    engine, _ = scripted()
    request = make_request("a", 10)
    reservation = reserve(engine, request)
    with pytest.raises(ValueError, match=r"\[0, 3\) is not a run of the 2 full ones"):
        engine.submit(request, reservation=reservation, landed=[(0, 3)])
    with pytest.raises(ValueError, match="does not own this reservation"):
        engine.submit(make_request("b", 10), reservation=reservation)
    engine.check_integrity()
    engine.release(reservation)
    assert engine.load().free_blocks == 16
    assert not engine.has_work()


def test_a_queued_request_loses_reserved_blocks_to_a_running_one_and_reuses_the_rest() -> None:
    engine, _ = scripted(num_blocks=7, max_num_seqs=1)
    run = Run()
    engine.submit(make_request("running", 8, max_tokens=9))
    step_once(engine, run)
    request = make_request("queued", 17)
    reservation = reserve(engine, request)
    assert len(reservation.blocks) == 5
    engine.submit(request, reservation=reservation, landed=[(0, 4)])
    step_once(engine, run)
    assert engine.starved()
    assert engine.load().preemptions_total == 1
    drive(engine, into=run)
    assert sorted(run.finished) == ["queued", "running"]
    # "running" took 2 blocks, the tail and the last landed one. The other 3 are still cached.
    assert run.use("queued") == (0, 12, 5)
    assert run.ids("queued") == [17, 18, 19, 20]


def test_parked_blocks_starve_a_running_request_until_they_are_released() -> None:
    engine, _ = scripted(num_blocks=4)
    parked = reserve(engine, make_request("parked", 8))
    engine.submit(make_request("a", 8, max_tokens=6))
    run = Run()
    step_once(engine, run)
    assert not engine.starved()
    for _ in range(3):
        assert step_once(engine, run).num_tokens == 0
        assert engine.starved()
    engine.release(parked)
    drive(engine, into=run)
    assert run.ids("a") == [8, 9, 10, 11, 12, 13]


# --- requests with outputs from another node ----------------------------------------------------


def resumed(outputs: tuple[int, ...], **params: Any) -> Request:
    return make_request("a", 10, (outputs,), max_tokens=12, **params)


def test_a_resumed_requests_block_hashes_and_reservation_include_its_outputs() -> None:
    engine, _ = scripted()
    outputs = tuple(range(50, 57))
    as_prompt = make_request("p", [*resumed(()).prompt_ids, *outputs])
    reservation = reserve(engine, resumed(outputs))
    assert reservation.hashes == engine.block_hashes(as_prompt)
    assert (len(reservation.hashes), len(reservation.blocks)) == (4, 5)
    choices = make_request("b", 10, (outputs, outputs), n=2, max_tokens=12)
    assert len(engine.block_hashes(choices)) == 2
    assert len(reserve(engine, choices).blocks) == 3


def test_landed_output_tokens_are_not_computed_and_not_counted_as_prompt_tokens() -> None:
    engine, runner = scripted()
    request = resumed(tuple(range(50, 57)))
    reservation = reserve(engine, request)
    engine.submit(request, reservation=reservation, landed=[(0, 1), (2, 4)], track=True)
    run = drive(engine)
    assert runner.work()[:2] == [[(4, 4)], [(16, 1)]]
    assert run.use("a") == (0, 6, 4)
    assert [each.computed for each in run.progress] == [16, 17]
    assert [(token.offset, token.id) for token in run.tokens] == [(i, 10 + i) for i in range(7, 12)]
    assert run.last("a").finish == "length"


def test_stop_ids_and_min_tokens_count_the_outputs_of_a_resumed_request() -> None:
    engine, runner = scripted()
    request = resumed((50, 51, 52), min_tokens=5, stop_token_ids=(14, 16))
    engine.submit(request, reservation=reserve(engine, request), landed=[(0, 3)])
    run = drive(engine)
    banned = [step[0].samples[0].banned for step in runner.steps]
    assert banned == [(EOS, 14, 16), (EOS, 14, 16), (), ()]
    assert run.ids("a") == [13, 14, 15, 16]
    assert (run.last("a").finish, run.last("a").stop_id) == ("stop", 16)


def test_a_reservation_may_take_the_whole_pool_if_the_last_token_needs_no_kv() -> None:
    engine, _ = scripted(num_blocks=4)
    request = make_request("a", 10, (tuple(range(7)),), max_tokens=50)
    reservation = reserve(engine, request)
    assert (len(reservation.blocks), len(reservation.hashes)) == (4, 4)
    engine.submit(request, reservation=reservation)
    run = drive(engine)
    assert (run.finished, [each.finish for each in run.complete]) == (["a"], ["length"])
    assert engine.load().free_blocks == 4
