"""Landed KV with holes: the engine computes the holes, skips the landed runs and rewrites no
block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.core.engine_core import EngineCore
from baton_engine.interface import Reservation
from baton_protocol.ids import RequestId
from baton_protocol.request import Request
from tests.support.engines.engine_core import Run, drive, make_request, run_all, scripted, step_once
from tests.support.engines.landing import BLOCK, content, land, sim, watched_sim

BLOCKS = st.sets(st.integers(0, 40))


def reserve(engine: EngineCore, request: Request) -> Reservation:
    reservation = engine.reserve(request)
    assert reservation is not None
    return reservation


def test_holes_are_computed_and_landed_runs_are_skipped() -> None:
    engine, runner = scripted()
    request = make_request("a", 30, max_tokens=2)
    landed = [(1, 3), (5, 6)]
    engine.submit(request, reservation=reserve(engine, request), landed=landed)
    run = drive(engine)
    assert runner.work() == [[(0, 4)], [(12, 8)], [(24, 6)], [(30, 1)]]
    assert run.use("a") == (0, 12, 18)
    assert [step.num_prompt_tokens for step in run.steps] == [4, 8, 6, 0]
    assert run.ids("a") == [30, 31]


def test_a_hole_is_computed_in_pieces_of_the_budget_without_samples() -> None:
    engine, runner = scripted(max_batched_tokens=5)
    request = make_request("a", 21, max_tokens=1)
    landed = [(0, 1), (3, 5)]
    engine.submit(request, reservation=reserve(engine, request), landed=landed)
    drive(engine)
    assert runner.work() == [[(4, 5)], [(9, 3)], [(20, 1)]]
    assert [len(step[0].samples) for step in runner.steps] == [0, 0, 1]


def test_the_budget_left_at_a_landed_run_goes_to_other_requests() -> None:
    engine, runner = scripted(max_batched_tokens=10)
    request = make_request("a", 20, max_tokens=1)
    engine.submit(request, reservation=reserve(engine, request), landed=[(1, 3)])
    engine.submit(make_request("b", 6, max_tokens=1))
    drive(engine)
    assert runner.work()[0] == [(0, 4), (0, 6)]


def test_runs_that_touch_each_other_or_the_cached_prefix_are_merged() -> None:
    engine, runner = scripted()
    request = make_request("a", 30, max_tokens=1)
    run_all(engine, [make_request("first", request.prompt_ids[:8], max_tokens=1)])
    runner.steps.clear()
    landed = [(1, 3), (3, 4), (6, 7)]
    engine.submit(request, reservation=reserve(engine, request), landed=landed)
    run = drive(engine)
    assert runner.work() == [[(16, 8)], [(28, 2)]]
    assert run.use("a") == (8, 12, 10)


def test_blocks_landed_after_a_hole_become_usable_when_the_hole_is_computed() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    request = make_request("a", 20, max_tokens=4)
    hashes = engine.block_hashes(request)
    engine.submit(request, reservation=reserve(engine, request), landed=[(1, 4)])
    assert engine.cache_changes().stored == (hashes[1], hashes[3])
    assert engine.cached_blocks(hashes) == 0
    run = Run()
    step_once(engine, run)
    assert engine.cached_blocks(hashes) == 4
    again = make_request("b", request.prompt_ids)
    engine.submit(again)
    drive(engine, into=run)
    assert run.use("b") == (16, 0, 4)


def test_the_last_token_of_a_prompt_that_landed_to_its_end_is_computed() -> None:
    engine, runner = scripted()
    request = make_request("a", 16, max_tokens=2)
    engine.submit(request, reservation=reserve(engine, request), landed=[(1, 2), (3, 4)])
    hashes = engine.block_hashes(request)
    assert [engine._pool.lookup([hash]) != [] for hash in hashes] == [False, True, False, False]
    run = drive(engine)
    assert runner.work() == [[(0, 4)], [(8, 4)], [(15, 1)], [(16, 1)]]
    assert run.use("a") == (0, 7, 9)
    assert engine.cached_blocks(hashes) == 4


def test_the_load_counts_only_tokens_to_compute() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    request = make_request("a", 30, max_tokens=1)
    engine.submit(request, reservation=reserve(engine, request), landed=[(2, 4), (5, 6)])
    assert engine.load().queued_tokens == 30 - 12
    engine.step()
    assert engine.load().queued_tokens == 30 - 12 - 4
    drive(engine)
    assert engine.load().computed_prompt_tokens_total == 18
    assert engine.load().fetched_prompt_tokens_total == 12


def test_a_request_with_prompt_logprobs_computes_landed_tokens_too() -> None:
    engine, runner = scripted()
    request = make_request("a", 20, max_tokens=1, prompt_logprobs=0)
    engine.submit(request, reservation=reserve(engine, request), landed=[(0, 1), (2, 4)])
    run = drive(engine)
    assert runner.work() == [[(0, 20)]]
    assert run.use("a") == (0, 0, 20)
    assert len(run.prompt_logprobs("a")) == 19


def test_a_preempted_request_reuses_its_cached_blocks_up_to_the_first_missing_one() -> None:
    engine, runner = scripted(num_blocks=9, max_batched_tokens=5)
    run = Run()
    engine.submit(make_request("old", 11, max_tokens=9))
    for _ in range(3):
        step_once(engine, run)
    request = make_request("young", 21, max_tokens=2)
    engine.submit(request, reservation=reserve(engine, request), landed=[(0, 2), (3, 5)])
    while not engine.load().preemptions_total:
        step_once(engine, run)
    runner.steps.clear()
    drive(engine, into=run)
    assert run.ids("young") == [21, 22]
    # "old" took the blocks of the tail and of the last landed block. The hole was computed before.
    assert run.use("young") == (0, 8 + 4, 9)
    assert sorted(run.finished) == ["old", "young"]


def test_a_queued_request_that_loses_its_blocks_computes_its_holes_and_runs() -> None:
    engine, _ = scripted(num_blocks=7, max_num_seqs=1)
    run = Run()
    engine.submit(make_request("running", 8, max_tokens=9))
    step_once(engine, run)
    request = make_request("queued", 17)
    engine.submit(request, reservation=reserve(engine, request), landed=[(1, 4)])
    assert engine.load().queued_tokens == 5
    step_once(engine, run)
    assert engine.load().preemptions_total == 1
    assert engine.load().queued_tokens == 17
    drive(engine, into=run)
    assert run.use("queued") == (0, 0, 17)
    assert run.ids("queued") == [17, 18, 19, 20]


def test_the_next_leader_reuses_only_landed_blocks_without_a_hole_before_them() -> None:
    engine, _ = scripted(max_batched_tokens=4)
    request = make_request("a", 22, n=2, max_tokens=2)
    reservation = reserve(engine, request)
    engine.submit(request, reservation=reservation, landed=[(1, 3), (4, 5)])
    run = Run()
    step_once(engine, run)
    engine.finish_choice(RequestId("a"), 0)
    engine.check_integrity()
    drive(engine, into=run)
    assert run.all_ids() == {("a", 1): [32, 33]}
    # Blocks 1 and 2 landed and are cached. Block 4 landed too, but after a hole.
    assert run.use("a") == (0, 8, 14)


# --- properties ---------------------------------------------------------------------------------


@given(
    length=st.integers(1, 40),
    cut=st.integers(0, 8),
    block=st.sampled_from([1, 3, 4]),
    wanted=BLOCKS,
    cached=st.integers(0, 40),
    budget=st.sampled_from([1, 2, 3, 7, 64]),
)
@settings(max_examples=150)
def test_exactly_the_holes_are_computed_and_all_counters_agree(
    length: int, cut: int, block: int, wanted: set[int], cached: int, budget: int
) -> None:
    donor = sim(block_size=block, max_model_len=60)
    prompt = make_request("a", length).prompt_ids
    whole = run_all(donor, [make_request("a", prompt, max_tokens=9)]).ids("a")
    request = make_request("a", prompt, (tuple(whole[:cut]),), max_tokens=9)
    engine, runner = watched_sim(block_size=block, max_model_len=60, max_batched_tokens=budget)
    if cached:
        run_all(engine, [make_request("head", prompt[:cached], max_tokens=1)])
        runner.steps.clear()
    reservation = reserve(engine, request)
    landed = land(engine, reservation, donor, wanted).landed
    available = set(range(reservation.cached * block))
    available |= {token for start, end in landed for token in range(start * block, end * block)}
    engine.submit(request, reservation=reservation, landed=landed, track=True, report_filled=True)
    run = drive(engine)

    assert [*whole[:cut], *run.ids("a")] == whole
    computed = [token for [(start, count)] in runner.steps for token in range(start, start + count)]
    assert computed == sorted(set(computed))
    known = length + cut
    # At least one token is computed. If all tokens are cached, the engine computes the whole last
    # block into a new one, because other requests may read the cached block.
    if reservation.cached * block == known:
        available -= set(range(known - block, known))
    available -= {known - 1}
    assert [token for token in computed if token < known] == sorted(set(range(known)) - available)
    shared = available & set(range(min(reservation.cached * block, length)))
    fetched = available & set(range(length)) - shared
    assert run.use("a") == (len(shared), len(fetched), length - len(shared) - len(fetched))

    reached = [each.computed for each in run.progress]
    assert reached[-1] == known
    done = set(available)
    for [(start, count)], progress in zip(runner.steps, reached, strict=False):
        done |= set(range(start, start + count))
        assert progress == min(
            known, next(token for token in range(known + 9) if token not in done)
        )

    chunk = 2 * block
    reported = {each.index for each in run.filled}
    assert len(reported) == len(run.filled)
    assert reported == {token // chunk for token in computed} & set(
        range((computed[-1] + 1) // chunk)
    )
    for each in run.filled:
        known_ids = [*prompt, *whole]
        name = engine.block_hashes(make_request("name", known_ids))[2 * each.index + 1]
        assert each.hash == name
        source = donor._pool.lookup(donor.block_hashes(make_request("name", known_ids)))
        assert content(engine, each.blocks) == content(
            donor, source[2 * each.index : 2 * each.index + 2]
        )


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    choices=st.integers(1, 2),
    wanted=BLOCKS,
    blocks=st.integers(11, 20),
    budget=st.sampled_from([1, 4, 9]),
)
@settings(max_examples=100)
def test_in_a_small_pool_each_request_has_the_same_tokens_as_alone(
    lengths: list[int], choices: int, wanted: set[int], blocks: int, budget: int
) -> None:
    donor = sim()
    requests = [
        make_request(f"r{index}", length, n=choices, max_tokens=9, temperature=1.0, seed=index)
        for index, length in enumerate(lengths)
    ]
    whole = {}
    for request in requests:
        whole.update(run_all(donor, [request]).all_ids())
    engine, _ = watched_sim(num_blocks=blocks, max_batched_tokens=budget, max_num_seqs=6)
    for request in requests:
        reservation = engine.reserve(request)
        landed = land(engine, reservation, donor, wanted).landed if reservation else []
        engine.submit(request, reservation=reservation, landed=landed, report_filled=True)
        engine.check_integrity()
    run = drive(engine)
    assert run.all_ids() == whole
    load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, blocks)
    for request in requests:
        assert sum(run.use(request.id)) == len(request.prompt_ids)


def test_a_hole_that_is_not_computed_changes_the_ids() -> None:
    """Here a hole counts as landed, so the engine reads poison. This shows that the tests above can
    fail."""
    donor = sim()
    request = make_request("a", 20, max_tokens=6)
    whole = run_all(donor, [request]).ids("a")
    engine, _ = watched_sim()
    reservation = reserve(engine, request)
    land(engine, reservation, donor, {0, 2, 3})
    engine.submit(request, reservation=reservation, landed=[(0, 4)])
    assert drive(engine).ids("a") != whole
    assert len(reservation.blocks) * BLOCK == 20
