"""The simulated engine: real KV bytes, ids that depend on every byte, and configured step times."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import SettingsError
from baton_engine.interface import Row
from baton_engine.kv.host_blocks import CopiedBlocks
from baton_engine.sim.build import NO_KV_SETTINGS, SimSettings, build_sim
from baton_engine.sim.memory import SimMemory
from baton_engine.sim.model import mix
from baton_engine.sim.timing import Timing
from baton_protocol.ids import BlockId, Fingerprint
from baton_protocol.layout import KVGroup, keys_and_values
from baton_protocol.request import Request
from tests.support.clock import Clock
from tests.support.engines.demands import kv_layout
from tests.support.engines.engine_core import Run, drive, make_request, run_all


def sim(**changes: Any) -> EngineCore:
    return build_sim(SimSettings(block_size=4, chunk_blocks=2, **changes))


def ids_of(engine: EngineCore, request: Request) -> list[int]:
    return run_all(engine, [request]).ids(request.id)


def copy_blocks(source: EngineCore, target: EngineCore, pairs: list[tuple[int, int]]) -> None:
    for source_id, target_id in pairs:
        data = bytearray(source.info.layout.block_bytes)
        source.memory.read([BlockId(source_id)], memoryview(data))
        target.memory.write([BlockId(target_id)], memoryview(data))


def test_sim_tokens_are_printable_and_a_request_finishes_by_length() -> None:
    run = run_all(sim(), [make_request("a", 10, max_tokens=200)])
    assert all(32 <= id < 127 for id in run.ids("a"))
    assert len(set(run.ids("a"))) > 40
    assert (len(run.ids("a")), run.last("a").finish) == (200, "length")


def test_the_ids_of_a_request_are_the_same_on_every_machine() -> None:
    """If the expected ids change, the sim is another model, and FORMULA must change."""
    ids = ids_of(sim(), make_request("a", [1, 2, 3, 4, 5], max_tokens=12))
    assert bytes(ids) == b"HP!H_{C$o?`X"


@pytest.mark.parametrize("change", [0, 3, 7, 12])
def test_each_token_of_the_prompt_affects_the_ids(change: int) -> None:
    prompt = list(range(13))
    other = [*prompt[:change], 50, *prompt[change + 1 :]]
    first, second = (
        ids_of(sim(), make_request("a", each, max_tokens=8)) for each in (prompt, other)
    )
    assert first != second


@pytest.mark.parametrize("foreign", [0, 1, 2])
def test_a_wrong_block_changes_the_ids(foreign: int) -> None:
    request = make_request("a", 13, max_tokens=8)
    expected = ids_of(sim(), request)
    donor = sim()
    run_all(donor, [make_request("other", 13, max_tokens=1)])
    source = sim()
    run_all(source, [request])
    target = sim()
    reservation = target.reserve(request)
    assert reservation is not None
    blocks = list(reservation.blocks)
    copy_blocks(source, target, [(1, blocks[0]), (2, blocks[1]), (3, blocks[2])])
    copy_blocks(donor, target, [(foreign + 1, blocks[foreign])])
    target.submit(request, reservation=reservation, landed=[(0, 3)])
    assert drive(target).ids("a") != expected


def test_one_wrong_byte_anywhere_in_a_block_changes_the_ids() -> None:
    request = make_request("a", 5, max_tokens=8)
    source = sim()
    expected = ids_of(source, request)
    data = bytearray(source.info.layout.block_bytes)
    source.memory.read([BlockId(1)], memoryview(data))
    for position in range(0, len(data), 37):
        wrong = bytearray(data)
        wrong[position] ^= 1
        target = sim()
        reservation = target.reserve(request)
        assert reservation is not None
        target.memory.write(reservation.blocks[:1], memoryview(wrong))
        target.submit(request, reservation=reservation, landed=[(0, 1)])
        assert drive(target).ids("a") != expected, position


@pytest.mark.parametrize("position", [0, 13, 14, 15, 19])
@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_token_depends_on_all_kv_that_it_sees_in_each_group(group: int, position: int) -> None:
    """Of the group with window 6, the token at 20 sees those from 15 on."""
    groups = (KVGroup((0,)), KVGroup((1,), 6), KVGroup((2,), 50))
    layout = kv_layout(dim=4, groups=groups)
    memory, blocks = SimMemory(layout, 18), [BlockId(id) for id in range(1, 19)]
    memory.extend(range(20), 0, blocks)
    expected = memory.extend([7], 20, blocks)
    block, data = blocks[position // 4 * 3 + group], bytearray(layout.block_bytes)
    memory.read([block], memoryview(data))
    data[position % 4 * 16] ^= 1  # in the layer's K, [token][dim]
    memory.write([block], memoryview(data))
    assert (memory.extend([7], 20, blocks) != expected) == (group != 1 or position >= 15)


# Blocks of the second group have 128 bytes unused.
OTHER_FIELDS = KVGroup((0,)), KVGroup((1,), 6, fields=keys_and_values(2, 2, "float32"))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("group", [0, 1])
def test_a_group_with_fields_of_its_own_has_digests_of_its_own(group: int, shards: int) -> None:
    """Also after its block went through the host tier, which does not know groups."""
    layout = kv_layout(layers=2, heads=2, dim=4, groups=OTHER_FIELDS, shards=shards)
    memory, blocks = SimMemory(layout, 13), [BlockId(id) for id in range(1, 13)]
    memory.extend(range(20), 0, blocks)
    expected = memory.extend([7], 20, blocks)
    block, other = blocks[4 * 2 + group], BlockId(13)  # of the tokens 16 to 19
    host = CopiedBlocks(memory, 1)
    host.save([block], [0])
    host.load([0], [other])
    moved = [other if each == block else each for each in blocks]
    assert memory.extend([7], 20, moved) == expected
    part = bytearray(layout.block_bytes // shards)
    memory.read([other], memoryview(part), shards - 1, group)
    part[0] ^= 1
    memory.write([other], memoryview(part), shards - 1, group)
    assert memory.extend([7], 20, moved) != expected


def test_pieces_of_a_prompt_give_the_digests_of_the_whole_with_windows() -> None:
    groups = (KVGroup((0,)), KVGroup((1,), 6), KVGroup((2,), 1))
    layout, tokens = kv_layout(dim=4, groups=groups), list(range(30, 60))
    blocks = [BlockId(id) for id in range(1, 25)]
    expected = SimMemory(layout, 24).extend(tokens, 0, blocks)
    for size in (1, 4, 7):
        memory, digests = SimMemory(layout, 24), list[int]()
        for start in range(0, 30, size):
            digests += memory.extend(tokens[start : start + size], start, blocks)
        assert digests == expected


@pytest.mark.parametrize("length", [4, 8, 13])
@pytest.mark.parametrize("seed", [None, 5])
def test_landed_blocks_give_the_same_ids_as_computed_blocks(length: int, seed: int | None) -> None:
    temperature = 0.0 if seed is None else 1.0
    request = make_request("a", length, max_tokens=12, seed=seed, temperature=temperature)
    source = sim()
    expected = ids_of(source, request)
    full = length // 4
    data = bytearray(source.info.layout.block_bytes * full)
    source.memory.read([BlockId(id) for id in range(1, full + 1)], memoryview(data))
    target = sim()
    target.hold([BlockId(1)])  # the target's blocks then have other ids than the source's
    reservation = target.reserve(request)
    assert reservation is not None
    target.memory.write(reservation.blocks[:full], memoryview(data))
    target.submit(request, reservation=reservation, landed=[(0, full)])
    run = drive(target)
    assert run.ids("a") == expected
    assert run.use("a")[1] == min(4 * full, length - 1)


def test_blocks_computed_after_landed_ones_have_the_bytes_of_an_undisturbed_run() -> None:
    request = make_request("a", 12, max_tokens=9)
    source, target = sim(), sim()
    run_all(source, [request])
    reservation = target.reserve(request)
    assert reservation is not None
    copy_blocks(source, target, [(1, reservation.blocks[0])])
    target.submit(request, reservation=reservation, landed=[(0, 1)])
    drive(target)
    blocks = [BlockId(id) for id in range(1, 6)]
    contents = []
    for engine in (source, target):
        data = bytearray(engine.info.layout.block_bytes * 5)
        engine.memory.read(blocks, memoryview(data))
        contents.append(data)
    assert contents[0] == contents[1]


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_can_be_copied_shard_by_shard(shards: int, dtype: str) -> None:
    request = make_request("a", 14, max_tokens=8)
    source, target = (sim(kv_heads=4, kv_shards=shards, dtype=dtype) for _ in range(2))
    expected = ids_of(source, request)
    assert expected == ids_of(sim(kv_heads=4, dtype=dtype), request)
    reservation = target.reserve(request)
    assert reservation is not None
    data = bytearray(source.info.layout.block_bytes * 3 // shards)
    for shard in reversed(range(shards)):
        source.memory.read([BlockId(id) for id in (1, 2, 3)], memoryview(data), shard)
        target.memory.write(reservation.blocks[:3], memoryview(data), shard)
    target.submit(request, reservation=reservation, landed=[(0, 3)])
    run = drive(target)
    assert run.use("a") == (0, 12, 2)
    assert run.ids("a") == expected


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_shard_changes_the_ids(missing: int) -> None:
    request = make_request("a", 14, max_tokens=8)
    source, target = (sim(kv_shards=2) for _ in range(2))
    expected = ids_of(source, request)
    reservation = target.reserve(request)
    assert reservation is not None
    data = bytearray(source.info.layout.block_bytes * 3 // 2)
    source.memory.read([BlockId(id) for id in (1, 2, 3)], memoryview(data), 1 - missing)
    target.memory.write(reservation.blocks[:3], memoryview(data), 1 - missing)
    target.submit(request, reservation=reservation, landed=[(0, 3)])
    assert drive(target).ids("a") != expected


def test_a_sim_shard_is_the_k_and_v_of_its_heads_in_each_layer() -> None:
    whole, sharded = (build_sim(SimSettings(kv_heads=4, kv_shards=shards)) for shards in (1, 2))
    request = make_request("a", 17, max_tokens=1)
    for engine in (whole, sharded):
        run_all(engine, [request])
    layout = whole.info.layout
    data, parts = bytearray(layout.block_bytes), []
    whole.memory.read([BlockId(1)], memoryview(data))
    for shard in range(2):
        part = bytearray(layout.block_bytes // 2)
        sharded.memory.read([BlockId(1)], memoryview(part), shard)
        parts.append(part)
    two_heads = 2 * layout.block_size * layout.head_dim * 4
    pieces = [data[at : at + two_heads] for at in range(0, len(data), two_heads)]
    assert [b"".join(pieces[::2]), b"".join(pieces[1::2])] == [bytes(part) for part in parts]


def test_choices_differ_when_sampled_and_agree_when_greedy() -> None:
    sampled = run_all(sim(), [make_request("a", 9, n=3, temperature=1.0, seed=7, max_tokens=20)])
    assert len({tuple(sampled.ids("a", choice)) for choice in range(3)}) == 3
    greedy = run_all(sim(), [make_request("a", 9, n=3, max_tokens=20)])
    assert len({tuple(greedy.ids("a", choice)) for choice in range(3)}) == 1


def test_the_seed_determines_sampled_ids_and_top_k_1_is_greedy() -> None:
    def ids(**params: Any) -> list[int]:
        return ids_of(sim(), make_request("a", 9, max_tokens=20, **params))

    assert ids(temperature=1.0, seed=1) == ids(temperature=1.0, seed=1)
    assert ids(temperature=1.0, seed=1) != ids(temperature=1.0, seed=2)
    assert ids(temperature=1.0, seed=1, top_k=1) == ids()


def test_logprobs_include_the_sampled_token_at_its_rank() -> None:
    request = make_request("a", 9, temperature=1.0, seed=3, logprobs=20, max_tokens=16)
    run = run_all(sim(), [request])
    for token in run.tokens:
        assert token.logprobs is not None
        top, sampled = token.logprobs.top, token.logprobs.sampled
        assert sampled.id == token.id
        assert top[sampled.rank - 1] == sampled
        assert [each.rank for each in top] == list(range(1, 21))
        assert all(a.logprob > b.logprob for a, b in pairwise(top))
    without = run_all(sim(), [make_request("a", 9, max_tokens=2, logprobs=0)])
    assert [len(token.logprobs.top) for token in without.tokens if token.logprobs] == [0, 0]


def test_the_sim_samples_eos_only_with_eos_every_and_never_a_banned_id() -> None:
    run = run_all(sim(eos_every=10), [make_request(f"a{i}", 9, max_tokens=100) for i in range(9)])
    assert all(run.last(f"a{i}").stop_id == 257 for i in range(9))
    run = run_all(sim(eos_every=1), [make_request("a", 9, max_tokens=9, min_tokens=5, logprobs=1)])
    assert run.ids("a")[5:] == [257]
    all_stop_ids = make_request("a", 9, min_tokens=4, stop_token_ids=tuple(range(32, 127)))
    assert len(run_all(sim(), [all_stop_ids]).ids("a")) == 4
    banned = tuple(range(32, 120))
    engine = sim(eos_every=1)
    run = run_all(engine, [make_request("a", 9, max_tokens=9, min_tokens=9, stop_token_ids=banned)])
    assert set(run.ids("a")) <= set(range(120, 127))


def test_the_sim_reuses_a_prefix_across_requests() -> None:
    engine = sim()
    prompt = list(range(40))
    run_all(engine, [make_request("a", [*prompt, 1], max_tokens=1)])
    run = run_all(engine, [make_request("b", [*prompt, 2, 3], max_tokens=3)])
    assert run.use("b") == (40, 0, 2)
    assert run.ids("b") == ids_of(sim(), make_request("b", [*prompt, 2, 3], max_tokens=3))


def test_reads_and_writes_of_the_wrong_size_are_refused() -> None:
    engine = sim()
    with pytest.raises(ValueError, match="10 bytes for 1 blocks; 2048 are needed"):
        engine.memory.write([BlockId(1)], memoryview(bytes(10)))
    with pytest.raises(ValueError, match="0 bytes for 2 blocks"):
        engine.memory.read([BlockId(1), BlockId(2)], memoryview(bytearray()))


# --- time ---------------------------------------------------------------------------------------


class WorkingClock(Clock):
    """A clock that advances by `work` seconds each time it is read, and by each sleep."""

    def __init__(self, work: float = 0.0) -> None:
        super().__init__(0.0)
        self.work = work
        self.slept: list[float] = []  # milliseconds

    def __call__(self) -> float:
        self.advance(self.work)
        return super().__call__()

    def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds * 1000, 6))
        self.advance(seconds)


def timed(clock: WorkingClock, **changes: Any) -> EngineCore:
    settings = SimSettings(
        block_size=4,
        prefill_base_ms=5,
        prefill_ms_per_token=2,
        decode_ms=3,
        decode_ms_per_seq=0.5,
        **changes,
    )
    return build_sim(settings, clock=clock, sleep=clock.sleep)


def test_a_step_takes_the_time_of_the_timing_model() -> None:
    clock = WorkingClock()
    engine = timed(clock, max_batched_tokens=8)
    run = Run()
    engine.submit(make_request("a", 10, max_tokens=3))
    drive(engine, into=run)
    assert clock.slept == [5 + 2 * 8, 5 + 2 * 2, 3.5, 3.5]


def test_a_mixed_step_takes_the_time_of_prefill_plus_decode() -> None:
    clock = WorkingClock()
    engine = timed(clock)
    for name in "ab":
        engine.submit(make_request(name, 4, max_tokens=3))
    engine.step()
    engine.submit(make_request("c", 10, max_tokens=1))
    engine.step()
    assert clock.slept == [5 + 2 * 8, 3 + 2 * 0.5 + 5 + 2 * 10]
    drive(engine)


def test_the_sims_computing_time_is_part_of_the_step_time() -> None:
    clock = WorkingClock(work=0.004)
    engine = timed(clock)
    run_all(engine, [make_request("a", 4, max_tokens=2)])
    assert clock.slept == [5 + 2 * 4 - 4]  # computing the decode step takes more than its 3.5 ms


def test_with_overlap_host_work_between_steps_adds_no_time() -> None:
    ends = {}
    for overlap in (False, True):
        clock = WorkingClock()
        engine = timed(clock, overlap=overlap)
        assert engine.overlap is overlap
        engine.submit(make_request("a", 4, max_tokens=3))
        while engine.has_work():
            engine.step()
            clock.advance(0.002)
        ends[overlap] = round(1000 * clock.now, 6)
    assert ends == {False: 13 + 3.5 + 3.5 + 3 * 2, True: 13 + 3.5 + 3.5 + 2}


def test_without_step_times_the_sim_never_sleeps() -> None:
    clock = WorkingClock()
    engine = build_sim(SimSettings(), clock=clock, sleep=clock.sleep)
    run_all(engine, [make_request("a", 10)])
    assert clock.slept == []


def test_a_one_token_piece_without_a_sample_counts_as_prefill() -> None:
    assert Timing(prefill_base_ms=1, decode_ms=100).step_ms([Row([1], 0, [BlockId(1)])]) == 1


# --- settings -----------------------------------------------------------------------------------


def test_only_the_geometry_of_a_sim_is_in_its_fingerprint() -> None:
    def fingerprint(**changes: Any) -> Fingerprint:
        return SimSettings(**changes).fingerprint()

    assert fingerprint() == fingerprint(model="other", decode_ms=5, num_blocks=9, eos_every=3)
    changes: list[dict[str, Any]] = [
        {"layers": 3},
        {"kv_heads": 1},
        {"head_dim": 8},
        {"block_size": 8},
        {"dtype": "bfloat16"},
        {"chunk_blocks": 3},
        {"kv_shards": 2},
        {"vocab_size": 300},
    ]
    assert len({fingerprint(**each) for each in ({}, *changes)}) == len(changes) + 1


def test_a_sim_refuses_more_memory_than_the_machine_has_without_overcommit() -> None:
    host = SimSettings(host_kv_memory=2 << 30)
    with pytest.raises(SettingsError, match=r"--host-kv-memory 2\.00 GiB cannot fit: 1\.00 GiB"):
        build_sim(host, free=lambda: 1 << 30)
    pool = SimSettings(num_blocks=1 << 17)  # blocks of 8 KiB: 1 GiB, more than the usable share
    with pytest.raises(SettingsError, match=r"--kv-memory 1\.00 GiB .*--overcommit"):
        build_sim(replace(pool, host_kv_memory=1 << 20), free=lambda: 1 << 30)
    with pytest.raises(SettingsError, match=r"--kv-memory 0\.02 GiB cannot fit"):
        build_sim(SimSettings(), free=lambda: 1 << 20)
    overcommitted = build_sim(SimSettings(overcommit=True), free=lambda: 1 << 20)
    assert overcommitted.info.num_blocks == 2048


def test_each_setting_of_a_sim_that_affects_kv_is_in_its_fingerprint() -> None:
    base = SimSettings()
    others: dict[str, Any] = {
        **{"model": "other", "dtype": "bfloat16", "chunk_blocks": 3, "kv_shards": 2},
        **{"eos_ids": (3,), "poison_token": 7, "overlap": True, "overcommit": True},
        "groups": (KVGroup((0, 1), 32),),
        "speculative_config": '{"method": "ngram"}',
        "scheduling": SchedulingOptions(enable_prefix_caching=False),
        "log_steps": "text",
        "runner": "pooling",
    }
    for name in (each.name for each in fields(SimSettings)):
        value = others.get(name) or getattr(base, name) * 2 + 1
        changed = replace(base, **{name: value})
        in_layout = base.layout() != changed.layout()
        in_fingerprint = changed.fingerprint() != base.fingerprint()
        assert in_fingerprint == (in_layout or name not in NO_KV_SETTINGS), name


def test_the_default_chunk_size_depends_on_the_geometry() -> None:
    assert SimSettings().layout().chunk_blocks == 8
    assert SimSettings(layers=32, kv_heads=8, head_dim=128).layout().chunk_blocks == 1
    assert SimSettings(chunk_blocks=2).layout().chunk_blocks == 2


def test_the_maximum_length_is_at_most_the_size_of_the_pool() -> None:
    assert sim(num_blocks=5, max_model_len=100).info.max_model_len == 20
    assert sim(num_blocks=50, max_model_len=100).info.max_model_len == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "--sim-layers is 0; it must be at least 1"),
        ({"max_model_len": 1}, "--max-model-len is 1"),
        ({"decode_ms": -1.0}, "--sim-decode-ms is -1.0; it must be at least 0"),
        ({"prefill_base_ms": float("nan")}, "--sim-prefill-base-ms is nan"),
        ({"chunk_blocks": 0}, "--chunk-blocks is 0"),
        ({"kv_shards": 0}, "--kv-shards is 0; it must be at least 1"),
        ({"kv_shards": 4}, "sim kv_shards is 4; it must divide kv_heads, 2"),
        ({"dtype": "int3"}, "sim dtype is 'int3'; use one of float32"),
        ({"head_dim": 3}, "sim head_dim is 3; in float32 it must be a multiple of 2"),
        ({"end_id": 300}, r"sim says ids in \[32, 300\); they must be within \[0, 259\)"),
        ({"first_id": 127}, "sim says ids in"),
        (
            {"speculative_config": '{"method": "draft_model", "model": "/m"}'},
            "the simulated engine has no weights for draft_model; use ngram, suffix or grammar",
        ),
    ],
)
def test_errors_for_invalid_sim_settings_name_them(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_sim(SimSettings(**changes))


def test_an_unknown_sim_setting_raises_type_error() -> None:
    with pytest.raises(TypeError, match="decode_millis"):
        SimSettings(**{"decode_millis": 2})  # type: ignore[arg-type]


def test_mix_is_deterministic_and_depends_on_the_order() -> None:
    assert mix(1, 2, 3) == mix(1, 2, 3) != mix(3, 2, 1)
    assert 0 <= mix(-1) < 2**64
