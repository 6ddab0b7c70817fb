"""Blocks, block tables, slots and the pool (O-BLK), and growth at a block boundary (O-NAN)."""

from __future__ import annotations

import random

import pytest
import torch

from baton_engine.attention.exact.backend import TorchAttention
from baton_engine.interface import Row
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.kv_pool import TorchMemory
from baton_engine.scheduling.sequence import blocks_for
from baton_protocol.hashing import extend_hashes
from baton_protocol.ids import BlockHash, BlockId
from baton_protocol.layout import KVGroup
from tests.oracles.engines import engine_of, free_order, hashes_of, step, tables, usage
from tests.support.engines.attention_specs import batch_of, specs_of
from tests.support.engines.demands import kv_layout
from tests.support.engines.engine_core import Run, drive, make_request, run_all, scripted, step_once
from tests.support.engines.small_pool import kv_of

TABLE = [BlockId(block) for block in (5, 2, 8, 12)]


def written_slots(
    position: int, table: list[BlockId] = TABLE, tokens: int = 1
) -> tuple[list[int], list[int]]:
    """The slots of the pool in which K and V of `tokens` tokens from `position` on are stored."""
    layout = kv_layout(block=16)
    memory = TorchMemory(layout, 16, torch.device("cpu"))
    one = torch.ones(tokens, 1, 2)
    TorchAttention(memory, specs_of(memory.layout, 1)).begin(
        batch_of([Row([0] * tokens, position, table)], memory.layout)
    ).attend(0, one, one, one)
    k_S, v_S = kv_of(memory)[:, 0, :, 0].sum(-1).transpose(0, 1).reshape(2, -1)
    return k_S.nonzero()[:, 0].tolist(), v_S.nonzero()[:, 0].tolist()


def test_position_35_is_stored_in_block_8_at_slot_131_O_BLK_1() -> None:
    assert written_slots(35) == ([131], [131])
    assert divmod(131, 16) == (8, 3)


@pytest.mark.parametrize(
    ("position", "slot"),
    [(0, 80), (15, 95), (16, 32), (31, 47), (32, 128), (47, 143), (48, 192), (63, 207)],
)
def test_other_positions_are_stored_in_their_slots_O_BLK_2(position: int, slot: int) -> None:
    assert written_slots(position) == ([slot], [slot])


def test_a_draft_beyond_a_block_is_stored_in_the_next_one_O_SPD_6() -> None:
    """Position 15 is a known token, 16 and 17 are drafts."""
    slots = [95, 144, 145]
    assert written_slots(15, [BlockId(5), BlockId(9)], 3) == (slots, slots)
    assert divmod(17, 16) == (1, 1)


BLOCKS_FOR = {1: 1, 15: 1, 16: 1, 17: 2, 35: 3, 36: 3, 48: 3, 100: 7, 105: 7, 130: 9} | {
    250: 16,
    300: 19,
    500: 32,
    1000: 63,
    4096: 256,
}


@pytest.mark.parametrize(("tokens", "blocks"), BLOCKS_FOR.items())
def test_blocks_for_gives_the_number_of_blocks_for_n_tokens_O_BLK_3(
    tokens: int, blocks: int
) -> None:
    assert blocks_for(tokens, 16) == blocks


@pytest.mark.parametrize("prompt", [2, 5, 10])
def test_kv_grows_by_one_token_per_step_and_the_last_token_has_none_O_BLK_4(prompt: int) -> None:
    engine, runner = engine_of()
    run = run_all(engine, [make_request("a", prompt, max_tokens=8)])
    assert runner.work() == [[(0, prompt)], *([(prompt + n, 1)] for n in range(7))]
    lengths = [row.start + len(row.tokens) for (row,) in runner.steps]
    assert lengths == list(range(prompt, prompt + 8))
    assert prompt + len(run.ids("a")) == lengths[-1] + 1


def test_a_request_takes_one_more_block_per_16_tokens_and_releases_all_O_BLK_5() -> None:
    engine, runner = engine_of(num_blocks=8)
    run = run_all(engine, [make_request("a", 32, max_tokens=33)])
    assert len(run.ids("a")) == 33
    for (row,) in runner.steps:
        end = row.start + len(row.tokens)
        assert len(row.blocks) == (2 if end <= 32 else 3 if end <= 48 else 4)
    assert engine.load().free_blocks == 8


def test_concurrent_requests_hold_only_the_blocks_they_need_O_BLK_5() -> None:
    engine, runner = engine_of(num_blocks=8)
    for name, prompt in (("A", 32), ("B", 64), ("C", 32)):
        engine.submit(make_request(name, prompt, max_tokens=1))
    step(engine)
    assert [len(table) for table in tables(runner)] == [2, 4, 2]
    assert len({block for table in tables(runner) for block in table}) == 8


def test_shared_blocks_become_free_when_both_holders_release_them_O_BLK_6() -> None:
    pool = BlockPool(15)
    shared = pool.allocate(3)
    a, b = [*shared, *pool.allocate(1)], [*shared, *pool.allocate(1)]
    pool.touch(shared)
    assert [pool.refs(block) for block in (*a, b[-1])] == [2, 2, 2, 1, 1]
    pool.release(a)
    assert [pool.refs(block) for block in (*a, b[-1])] == [1, 1, 1, 0, 1]
    assert a[-1] in pool.free_order()
    pool.release(b)
    assert pool.num_free == 15


def test_the_tail_of_a_freed_request_is_reused_first_O_BLK_7() -> None:
    pool = BlockPool(6)
    pool.release(pool.allocate(4))
    assert pool.free_order() == [5, 6, 4, 3, 2, 1]


def test_a_new_pool_is_free_in_id_order_and_block_0_is_padding_O_BLK_8() -> None:
    engine, _ = engine_of(num_blocks=7)  # with block 0, memory has 8 blocks
    assert free_order(engine) == [1, 2, 3, 4, 5, 6, 7]
    assert (engine.load().total_blocks, engine.load().free_blocks, usage(engine)) == (7, 7, 0)
    with pytest.raises(ValueError, match=r"block 0 is not in 1\.\.7"):
        BlockPool(7).touch([BlockId(0)])


def test_allocating_more_blocks_than_are_free_raises_and_changes_nothing_O_BLK_8b() -> None:
    pool = BlockPool(7)
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="6 blocks asked for, 5 are free"):
        pool.allocate(6)
    assert pool.free_order() == [3, 4, 5, 6, 7]
    pool.check_integrity(dict.fromkeys(held, 1))


def test_a_hit_removes_a_freed_block_from_the_free_queue_O_BLK_8c() -> None:
    pool = BlockPool(7)
    blocks = pool.allocate(5)
    name = BlockHash(b"five".ljust(16))
    pool.register(blocks[4], name, ends_chunk=False)
    assert pool.refs(blocks[4]) == 1
    pool.release(blocks[4:])
    assert (pool.refs(blocks[4]), pool.free_order()) == (0, [6, 7, 5])
    assert pool.hash_of(blocks[4]) == name
    pool.touch(pool.lookup([name]))
    assert (pool.refs(blocks[4]), pool.free_order()) == (1, [6, 7])
    pool.allocate(2)
    assert not pool.fits(1)
    assert pool.lookup([name]) == [5]


def test_a_scripted_trace_of_a_pool_of_8_blocks_gives_the_expected_states_O_BLK_9() -> None:
    """B, C and D finish after their prompt. A hold keeps their blocks, as a transfer would."""
    engine, runner = scripted(lambda sample: sample.position + 1, num_blocks=7)
    names = hashes_of(engine, range(1, 13))
    assert (free_order(engine), usage(engine)) == ([1, 2, 3, 4, 5, 6, 7], 0)

    def state() -> tuple[list[int], float]:
        """The free queue and the pool's usage."""
        return free_order(engine), round(usage(engine), 4)

    def prefill(name: str, tokens: list[int]) -> list[BlockId]:
        engine.submit(make_request(name, tokens), prefill_only=True, track=True)
        (progress,) = step_once(engine, Run()).progress
        engine.hold(progress.blocks)
        step(engine)  # the request releases its blocks
        return list(progress.blocks)

    engine.submit(make_request("A", range(1, 11), max_tokens=50))
    step(engine)
    assert (tables(runner)[0], state()) == ([1, 2, 3], ([4, 5, 6, 7], 0.4286))
    assert engine._pool.lookup(names) == [1, 2]
    for known in ([1, 2], [1, 2, 3]):  # tokens 11 and 12
        step(engine)
        assert (engine._pool.lookup(names), state()) == (known, ([4, 5, 6, 7], 0.4286))
    step(engine)  # token 13
    assert (tables(runner)[0], state()) == ([1, 2, 3, 4], ([5, 6, 7], 0.5714))
    engine.abort(make_request("A", 1).id)
    assert state() == ([5, 6, 7, 4, 3, 2, 1], 0)
    assert engine._pool.lookup(names) == [1, 2, 3]
    assert engine._pool.hash_of(BlockId(4)) is None

    b = prefill("B", [*range(1, 9), 70, 71, 72])
    assert (b, state()) == ([1, 2, 5], ([6, 7, 4, 3], 0.4286))
    c = prefill("C", list(range(1, 13)))
    assert (c, state()) == ([1, 2, 6], ([7, 4, 3], 0.5714))
    assert [engine._pool.refs(block) for block in c] == [2, 2, 1]
    assert engine._pool.hash_of(BlockId(3)) == engine._pool.hash_of(BlockId(6)) == names[2]
    d = prefill("D", list(range(30, 42)))
    assert (d, state()) == ([7, 4, 3], ([], 1.0))
    assert engine._pool.lookup(names) == [1, 2, 6]
    engine.submit(make_request("E", [80]))
    assert (step(engine), state()) == ([], ([], 1.0))
    engine.abort(make_request("E", 1).id)
    for blocks, expected in (
        (b, ([5], 0.8571)),
        (c, ([5, 6, 2, 1], 0.4286)),
        (d, ([5, 6, 2, 1, 3, 4, 7], 0)),
    ):
        engine.unhold(blocks)
        assert state() == expected


def test_100_tokens_of_which_64_are_cached_need_3_new_blocks_O_BLK_10() -> None:
    engine, runner = engine_of()
    prompt = make_request("a", 100).prompt_ids
    run_all(engine, [make_request("head", prompt[:65], max_tokens=1)])
    run = run_all(engine, [make_request("whole", prompt, max_tokens=1)])
    assert run.use("whole") == (64, 0, 36)
    assert runner.work()[-1] == [(64, 36)]
    assert tables(runner)[0][:4] == tables(runner, 0)[0][:4]
    assert len(tables(runner)[0]) == 7
    assert engine.cached_blocks(hashes_of(engine, prompt)) == 6


def test_fetched_blocks_are_cached_only_after_they_landed_O_BLK_10b() -> None:
    engine, runner = engine_of()
    prompt = make_request("a", 100).prompt_ids
    names = hashes_of(engine, prompt)
    run_all(engine, [make_request("head", prompt[:33], max_tokens=1)])
    request = make_request("whole", prompt, max_tokens=1)
    reservation = engine.reserve(request)
    assert reservation is not None
    assert (len(reservation.blocks), reservation.cached) == (7, 2)
    assert engine.cached_blocks(names) == 2  # the other blocks have not landed yet
    engine.submit(request, reservation=reservation, landed=[(0, 5)])
    assert engine.cached_blocks(names) == 5
    run = drive(engine)
    assert run.use("whole") == (32, 48, 20)
    assert runner.work()[-1] == [(80, 20)]
    assert engine.cached_blocks(names) == 6


@pytest.mark.parametrize("tokens", [1, 5])
def test_with_a_window_of_32_the_first_4_blocks_of_100_tokens_are_not_read_O_BLK_11(
    tokens: int,
) -> None:
    """The output depends neither on the content of these blocks nor on their entries in the table.
    It depends on the fifth block."""
    layout = kv_layout(heads=2, dim=8, block=16)
    memory = TorchMemory(layout, 8, torch.device("cpu"))
    noise = torch.Generator().manual_seed(11)
    kv_of(memory).normal_(generator=noise)
    q, k, v = (torch.randn(tokens, heads, 8, generator=noise) for heads in (4, 2, 2))

    def output(*table: int) -> torch.Tensor:
        row = Row([0] * tokens, 100, [BlockId(block) for block in table])
        return (
            TorchAttention(memory, specs_of(memory.layout, 4, (32,)))
            .begin(batch_of([row], memory.layout))
            .attend(0, q, k, v)
        )

    whole = output(7, 6, 5, 4, 3, 2, 1)
    assert torch.equal(output(0, 0, 0, 0, 3, 2, 1), whole)
    assert not torch.equal(output(7, 6, 5, 4, 0, 2, 1), whole)
    kv_of(memory)[[7, 6, 5, 4]] = torch.nan
    assert torch.equal(output(7, 6, 5, 4, 3, 2, 1), whole)


def test_a_request_gives_back_the_4_blocks_that_a_window_of_32_has_left_O_BLK_11() -> None:
    window = KVGroup((0,), window=32)
    engine, runner = engine_of(layout=kv_layout(block=16, groups=(window,)), num_blocks=20)
    engine.submit(make_request("a", 100, max_tokens=9))
    step(engine)
    assert (len(tables(runner)[0]), engine.load().free_blocks) == (7, 13 + 4)
    step(engine)
    assert tables(runner)[0] == [0, 0, 0, 0, 5, 6, 7]
    drive(engine)


def test_at_any_time_each_block_is_either_free_or_held_O_BLK_12() -> None:
    engine, runner = engine_of(4, num_blocks=24, max_batched_tokens=16, max_num_seqs=6)
    draw = random.Random(12)
    for index in range(40):
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 24))]  # many share a prefix
        length = draw.randrange(1, 20)
        engine.submit(make_request(f"r{index}", prompt, max_tokens=length, n=draw.randrange(1, 3)))
    while engine.has_work():
        step(engine)  # also checks the pool's integrity
        sequences = [each for state in engine._states.values() for each in state.live.values()]
        held = [block for each in sequences for block in each.blocks]
        free = free_order(engine)
        assert len(free) == len(set(free)) == 24 - len(set(held))
        assert not set(free) & set(held)
        assert sum(engine._pool.refs(BlockId(id)) for id in range(1, 25)) == len(held)
        assert all(len(set(each.blocks)) == len(each.blocks) for each in sequences)
        assert len(runner.steps) < 3000
    assert engine.load().preemptions_total > 0


def test_a_token_after_a_full_block_takes_a_new_block_O_NAN_1() -> None:
    engine, runner = engine_of(256)
    run_all(engine, [make_request("a", 256, max_tokens=2)])
    assert [len(row.blocks) for (row,) in runner.steps] == [1, 2]
    assert runner.work()[-1] == [(256, 1)]


def test_a_block_is_cached_when_it_is_full_O_NAN_1b() -> None:
    engine, _ = engine_of(256)
    prompt = make_request("a", 511).prompt_ids
    names = extend_hashes(hashes_of(engine, prompt)[0], [*prompt[256:], 511 % 90], 256)
    known = [*hashes_of(engine, prompt), *names]
    engine.submit(make_request("a", prompt, max_tokens=3))
    step(engine)
    assert engine.cached_blocks(known) == 1
    step(engine)  # computes token 512
    assert engine.cached_blocks(known) == 2
    drive(engine)


def test_a_token_inside_a_block_takes_no_new_block_O_NAN_1c() -> None:
    engine, runner = engine_of(256)
    run_all(engine, [make_request("a", 599, max_tokens=3)])
    assert [len(row.blocks) for (row,) in runner.steps] == [3, 3, 3]
    assert runner.steps[1][0].start + 1 - 2 * 256 == 88
