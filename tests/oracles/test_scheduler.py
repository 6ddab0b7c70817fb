"""The scheduler (O-SCH): chunked prefill under one budget, continuous batching and preemption."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

import pytest

from baton_cli.bench.static_batches import static_batches, useful_share
from baton_engine.config.scheduling_options import SchedulingOptions, SchedulingPolicy
from baton_engine.core.engine_core import EngineCore
from baton_engine.kv.block_pool import BlockPool
from baton_protocol.ids import BlockHash
from tests.oracles.engines import engine_of, free_order, row_sizes, step, tables
from tests.support.engines.engine_core import Run, ScriptedRunner, drive, make_request, run_all


def names_of(engine: EngineCore) -> tuple[list[str], list[str]]:
    """The names of the running and of the waiting requests, in the order of their queues."""
    running, waiting = engine._scheduler.running, engine._scheduler.waiting
    return [str(each.state.request.id) for each in running], [
        str(each.state.request.id) for each in waiting
    ]


def test_a_prompt_of_1000_is_computed_in_pieces_of_256_O_SCH_1() -> None:
    engine, runner = engine_of(max_batched_tokens=256)
    run_all(engine, [make_request("a", 1000, max_tokens=1)])
    assert runner.work() == [[(0, 256)], [(256, 256)], [(512, 256)], [(768, 232)]]


def test_a_long_prompt_is_cut_at_the_threshold_beside_decodes_O_SCH_2() -> None:
    options = SchedulingOptions(long_prefill_token_threshold=256)
    engine, runner = engine_of(max_batched_tokens=2048, scheduling=options)
    for name in ("B", "C", "D"):
        engine.submit(make_request(name, 1, max_tokens=9))
    step(engine)
    engine.submit(make_request("A", 1000, max_tokens=9))
    sizes = []
    for joins in (None, "E", None, None):
        if joins is not None:
            engine.submit(make_request(joins, 40, max_tokens=9))
        tokens = step(engine)
        sizes.append(sum(row_sizes(runner)))
        assert ("A" in [token.request for token in tokens]) == (len(sizes) == 4)
    assert sizes == [3 + 256, 3 + 256 + 40, 4 + 256, 4 + 232]
    drive(engine)


@pytest.mark.parametrize("prompt", [17, 20, 24])
def test_with_pieces_of_8_tokens_only_the_third_step_samples_O_SCH_3(prompt: int) -> None:
    engine, runner = engine_of(max_batched_tokens=8)
    run = run_all(engine, [make_request("a", prompt, max_tokens=1)])
    assert [len(result.tokens) for result in run.steps] == [0, 0, 1]
    assert [row_sizes(runner, index) for index in range(3)] == [[8], [8], [prompt - 16]]


def test_a_lone_prompt_gets_the_whole_budget_O_SCH_3b() -> None:
    engine, runner = engine_of(max_batched_tokens=2048)
    run_all(engine, [make_request("a", 5000, max_tokens=1)])
    assert [row_sizes(runner, index) for index in range(3)] == [[2048], [2048], [904]]


def test_48_decoding_requests_leave_2000_of_2048_tokens_for_a_prompt_O_SCH_3c() -> None:
    engine, runner = engine_of(max_batched_tokens=2048)
    for index in range(48):
        engine.submit(make_request(f"d{index}", 1, max_tokens=9))
    step(engine)
    engine.submit(make_request("long", 5000, max_tokens=1))
    for rest in (2000, 2000, 1000):
        step(engine)
        assert row_sizes(runner) == [1] * 48 + [rest]
    drive(engine)


def test_a_step_mixes_prompts_and_decodes_O_SCH_4() -> None:
    engine, runner = engine_of()
    engine.submit(make_request("B", 50))
    engine.submit(make_request("C", 29))
    step(engine)
    engine.submit(make_request("A", 100))
    step(engine)
    assert sorted(runner.work()[-1]) == [(0, 100), (29, 1), (50, 1)]
    assert sum(row_sizes(runner)) == 102
    engine.submit(make_request("D", 50))
    step(engine)
    assert sorted(runner.work()[-1]) == [(0, 50), (30, 1), (51, 1), (100, 1)]
    assert sum(row_sizes(runner)) == 53
    drive(engine)


def test_requests_with_outputs_have_the_expected_context_lengths_and_blocks_O_SCH_5() -> None:
    engine, runner = engine_of()
    sizes = {"A": (10, 95), "B": (500, 0), "C": (50, 200), "D": (100, 30), "E": (1000, 0)}
    for name, (prompt, output) in sizes.items():
        outputs = ((1,) * output,) if output else ((),)
        engine.submit(make_request(name, prompt, outputs, max_tokens=output + 1))
    step(engine)
    assert row_sizes(runner) == [105, 500, 250, 130, 1000]
    assert [len(table) for table in tables(runner)] == [7, 32, 16, 9, 63]


def test_no_position_beyond_max_model_len_is_computed_O_SCH_6() -> None:
    engine, runner = engine_of(max_model_len=16)
    run = run_all(
        engine, [make_request("a", 13, max_tokens=50), make_request("b", 3, max_tokens=9)]
    )
    assert max(row.start + len(row.tokens) for rows in runner.steps for row in rows) == 15
    assert (len(run.ids("a")), run.last("a").finish) == (3, "length")
    assert len(run.ids("b")) == 9


def full_engine() -> tuple[EngineCore, ScriptedRunner]:
    """An engine whose 5 blocks of 4 tokens are all held: R1 has blocks 1 and 2, R2 has 3 and 4, and
    R3 has 5. Each has sampled one token."""
    engine, runner = engine_of(4, num_blocks=5)
    for name, prompt in (("R1", 8), ("R2", 8), ("R3", 4)):
        engine.submit(make_request(name, prompt, max_tokens=6))
    step(engine)
    assert tables(runner) == [[1, 2], [3, 4], [5]]
    assert free_order(engine) == []
    return engine, runner


def test_the_oldest_request_gets_a_block_and_the_others_are_preempted_O_SCH_7() -> None:
    engine, runner = full_engine()
    (r3,) = [each for each in engine._scheduler.running if each.state.request.id == "R3"]
    step(engine)
    assert (runner.work()[-1], tables(runner)) == ([(8, 1)], [[1, 2, 5]])
    assert names_of(engine) == (["R1"], ["R2", "R3"])
    assert free_order(engine) == [4, 3]
    assert engine.load().preemptions_total == 2
    step(engine)
    assert (runner.work()[-1], tables(runner)) == ([(9, 1)], [[1, 2, 5]])
    assert names_of(engine) == (["R1"], ["R2", "R3"])
    assert (r3.missing, engine.cached_blocks(r3.hashes_of(1))) == (5, 0)
    run = drive(engine)
    assert sorted(run.finished) == ["R1", "R2", "R3"]


def test_hits_in_the_free_queue_count_as_demand_O_SCH_8() -> None:
    pool = BlockPool(4)
    names = [BlockHash(name.ljust(16)) for name in (b"one", b"two")]
    blocks = pool.allocate(4)
    for block, name in zip(blocks, names, strict=False):
        pool.register(block, name, ends_chunk=False)
    pool.release(blocks[:2])
    hits = pool.lookup(names)
    assert (len(hits), pool.num_free) == (2, 2)
    assert not pool.fits(1, hits)
    assert pool.fits(0, hits)


def test_a_request_waits_if_its_hits_and_new_blocks_exceed_the_free_blocks_O_SCH_8() -> None:
    engine, runner = full_engine()
    step(engine)
    r2 = engine._scheduler.waiting[0]
    assert len(engine._pool.lookup(r2.hashes_of(2))) == 2
    assert engine.load().free_blocks == 2
    step(engine)
    assert len(runner.steps[-1]) == 1


def spans(outputs: Mapping[str, int]) -> tuple[dict[str, tuple[int, int]], int]:
    """The step in which each request was admitted and the one after which it finished, with at most
    3 running requests; and the total number of steps."""
    engine, _ = engine_of(max_num_seqs=3)
    for index, (name, count) in enumerate(outputs.items()):
        engine.submit(make_request(name, [index], max_tokens=count, ignore_eos=True))
    run = drive(engine)
    token_steps: dict[str, list[int]] = {name: [] for name in outputs}
    for number, result in enumerate(run.steps):
        for token in result.tokens:
            token_steps[token.request].append(number)
    assert all(len(token_steps[name]) == count for name, count in outputs.items())
    return {name: (steps[0], steps[-1] + 1) for name, steps in token_steps.items()}, len(run.steps)


def test_a_finished_request_is_replaced_in_the_next_step_O_SCH_11() -> None:
    actual, steps = spans({"R1": 10, "R2": 50, "R3": 100, "R4": 40, "R5": 30})
    assert actual == {"R1": (0, 10), "R2": (0, 50), "R3": (0, 100), "R4": (10, 50), "R5": (50, 80)}
    assert steps == 100
    assert mean(finished for _, finished in actual.values()) == 58


def test_six_requests_with_three_running_have_the_expected_latency_O_SCH_12() -> None:
    actual, steps = spans({"A": 50, "B": 100, "C": 200, "D": 50, "E": 80, "F": 150})
    first = {"A": (0, 50), "B": (0, 100), "C": (0, 200)}
    assert actual == first | {"D": (50, 100), "E": (100, 180), "F": (100, 250)}
    assert steps == 250
    assert mean(finished for _, finished in actual.values()) == pytest.approx(146.67, abs=0.005)
    assert static_batches([50, 100, 200, 50, 80, 150], 3)[-1].end == 350


def static_spans(outputs: Mapping[str, int], size: int) -> dict[str, tuple[int, int]]:
    """The first step and the end of each request in static batches."""
    batches = static_batches(list(outputs.values()), size)
    each = [(batch.begin, batch.end) for batch in batches for _ in batch.outputs]
    return dict(zip(outputs, each, strict=True))


@pytest.mark.parametrize(
    ("outputs", "idle", "useful"),
    [
        pytest.param((10, 50, 100), (90, 50, 0), 160 / 300, id="O-SCH-9"),
        pytest.param((50, 100, 200), (150, 100, 0), 350 / 600, id="O-SCH-10"),
    ],
)
def test_a_static_batch_ends_with_its_longest_answer_O_SCH_9_O_SCH_10(
    outputs: tuple[int, ...], idle: tuple[int, ...], useful: float
) -> None:
    [batch] = static_batches(outputs, 3)
    assert (batch.begin, batch.end, batch.idle) == (0, max(outputs), idle)
    assert useful_share([batch]) == pytest.approx(useful)
    names = {str(index): count for index, count in enumerate(outputs)}
    actual, steps = spans(names)
    assert steps == batch.end
    assert tuple(batch.end - finished for _, finished in actual.values()) == idle


def test_the_next_static_batch_begins_after_the_longest_answer_O_SCH_10() -> None:
    outputs = {"A": 50, "B": 100, "C": 200, "D": 50, "E": 80}
    static = static_batches(list(outputs.values()), 3)[1]
    assert (static.begin, static.outputs, static.idle) == (200, (50, 80), (30, 0))
    actual, _ = spans(outputs)
    assert (actual["D"], actual["E"]) == ((50, 100), (100, 180))


def test_a_request_waits_for_the_whole_static_batch_before_it_O_SCH_10b() -> None:
    first, second = static_batches([100, 200, 10], 2)
    assert (first.begin, first.end, first.idle) == (0, 200, (100, 0))
    assert second.begin == 200


def test_static_batches_take_140_steps_where_continuous_ones_take_100_O_SCH_11b() -> None:
    outputs = {"R1": 10, "R2": 50, "R3": 100, "R4": 40, "R5": 30}
    static = static_spans(outputs, 3)
    assert max(end for _, end in static.values()) == 140
    assert mean(end for _, end in static.values()) == 116
    _, steps = spans(outputs)
    assert steps == 100


def test_a_chunked_prompt_does_not_interrupt_another_requests_decode_O_SCH_13() -> None:
    engine, runner = engine_of(max_batched_tokens=26)
    engine.submit(make_request("B", 5, max_tokens=9))
    step(engine)
    engine.submit(make_request("A", 100, max_tokens=1))
    for _ in range(4):
        tokens = step(engine)
        assert row_sizes(runner) == [1, 25]
        assert "B" in [token.request for token in tokens]
    drive(engine)


@pytest.mark.parametrize(
    ("policy", "running"), [("fcfs", ["R4", "R2", "R1"]), ("priority", ["R1", "R4", "R2"])]
)
def test_the_preempted_request_is_the_last_to_arrive_or_the_least_urgent_O_SCH_14(
    policy: SchedulingPolicy, running: list[str]
) -> None:
    """The order of arrival is R4, R2, R1, R3. Only R4's next token needs a block."""
    options = SchedulingOptions(scheduling_policy=policy)
    engine, runner = engine_of(4, num_blocks=7, scheduling=options)
    for name, prompt, priority in (("R4", 4, 5), ("R2", 5, 10), ("R1", 5, 0), ("R3", 5, 10)):
        engine.submit(make_request(name, prompt, priority=priority))
    step(engine)
    assert engine.load().free_blocks == 0
    step(engine)
    assert names_of(engine) == (running, ["R3"])
    assert row_sizes(runner) == [1, 1, 1]
    drive(engine)


def test_a_parked_request_is_overtaken_and_one_that_does_not_fit_is_not_O_SCH_15() -> None:
    engine, runner = engine_of(4, num_blocks=6)
    parked = engine.reserve(make_request("parked", 4))
    engine.submit(make_request("ready", 4, max_tokens=9))
    assert parked is not None
    step(engine)
    assert row_sizes(runner) == [4]
    engine.submit(make_request("big", 20))
    engine.submit(make_request("small", 1))
    step(engine)
    assert names_of(engine) == (["ready"], ["big", "small"])
    engine.release(parked)
    drive(engine)


def test_a_step_that_preempts_admits_no_request_O_SCH_16() -> None:
    """The second choice of `old` is older than `young`, and the blocks that `young` lost are enough
    for it."""
    engine, runner = engine_of(4, num_blocks=4, max_num_seqs=2)
    engine.submit(make_request("old", 8, n=2))
    engine.submit(make_request("young", 8))
    step(engine)
    assert names_of(engine) == (["old", "young"], ["old"])
    step(engine)
    assert (names_of(engine), engine.load().free_blocks) == ((["old"], ["old", "young"]), 1)
    assert row_sizes(runner) == [1]
    step(engine)
    assert (names_of(engine), row_sizes(runner)) == ((["old", "old"], ["young"]), [1, 1])
    drive(engine)


def test_with_the_kv_cache_each_of_1000_tokens_is_computed_once_O_PRF_3() -> None:
    engine, _ = engine_of()
    run: Run = run_all(engine, [make_request("a", [1], max_tokens=1000)])
    assert len(run.ids("a")) == 1000
    assert sum(result.num_tokens for result in run.steps) == 1000
