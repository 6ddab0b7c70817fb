"""The scheduler: the token budget, running sequences first, chunked prefill and preemption."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.errors import SettingsError
from baton_engine.kv.block_pool import BlockPool
from baton_engine.scheduling.scheduler import Piece, Scheduler
from baton_engine.scheduling.sequence import (
    BlockNaming,
    RequestState,
    Sequence,
    Submission,
    blocks_for,
)
from baton_engine.sim.build import SimSettings, build_sim
from baton_protocol.hashing import extend_hashes
from baton_protocol.ids import BlockHash
from tests.support.engines.demands import kv_layout
from tests.support.engines.engine_core import make_request, run_all, scripted

BLOCK = 4
LAYOUT = kv_layout(block=BLOCK)
ROOT = BlockHash(bytes(16))


class SchedulerHarness:
    """A scheduler in a minimal engine, which computes pieces and appends a token to each sequence
    that is fully computed."""

    def __init__(self, blocks: int, *, budget: int = 1000, seqs: int = 100, **options: Any) -> None:
        """`options` are those of SchedulingOptions."""
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(
            *(self.pool, LAYOUT),
            max_batched_tokens=budget,
            max_num_seqs=seqs,
            options=SchedulingOptions(**options),
        )
        self.arrivals = 0

    def sequence(self, name: str, prompt: int, *, track: bool = False, **params: Any) -> Sequence:
        self.arrivals += 1
        request = make_request(name, prompt, **params)
        state = RequestState(
            request,
            BlockNaming(ROOT, LAYOUT),
            arrival=self.arrivals,
            given_hashes=extend_hashes(ROOT, request.prompt_ids, BLOCK),
            submission=Submission(track=track),
        )
        return Sequence(state, 0)

    def add(self, name: str, prompt: int, *, track: bool = False, **params: Any) -> Sequence:
        sequence = self.sequence(name, prompt, track=track, **params)
        self.scheduler.add(sequence)
        return sequence

    def add_holding(
        self, name: str, prompt: int, *, blocks: int | None = None, priority: int = 0
    ) -> Sequence:
        """Add a sequence that already holds blocks, as from a reservation."""
        sequence = self.sequence(name, prompt, priority=priority)
        held = blocks_for(prompt, BLOCK) if blocks is None else blocks
        sequence.set_blocks(self.pool.allocate(held))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[str, int]:
        """Schedule and compute a step. Return the number of tokens of each request."""
        pieces = self.scheduler.schedule()
        for piece in pieces:
            self.compute(piece)
        return {piece.sequence.state.request.id: piece.count for piece in pieces}

    def launch(self, *, ahead: bool = False) -> dict[str, int]:
        """Schedule a step and leave it in flight. Return the number of tokens of each request."""
        pieces, samples = self.scheduler.schedule(ahead=ahead), count()
        for piece in pieces:
            last = piece.count == piece.sequence.due
            piece.sequence.note_launch(piece.count, next(samples) if last else -1)
        return {piece.sequence.state.request.id: piece.count for piece in pieces}

    def compute(self, piece: Piece) -> None:
        sequence = piece.sequence
        sequence.note_computed(piece.count)
        full = sequence.computed // BLOCK
        for index in range(sequence.registered_spans, full):
            hash = sequence.hashes_of(full)[index]
            self.pool.register(sequence.blocks[index], hash, ends_chunk=False)
        sequence.registered_spans = full
        if not sequence.missing:
            sequence.tokens.append(sequence.known % 90)

    def finish(self, sequence: Sequence) -> None:
        self.pool.release(self.scheduler.remove(sequence))

    def names(self, queue: list[Sequence]) -> list[str]:
        return [each.state.request.id for each in queue]

    @property
    def running(self) -> list[str]:
        return self.names(self.scheduler.running)

    @property
    def waiting(self) -> list[str]:
        return self.names(self.scheduler.waiting)


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (130, 9), (4096, 256)]
)
def test_blocks_for_rounds_up_to_whole_blocks(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks


def test_a_new_scheduler_is_not_starved_and_owes_no_blocks() -> None:
    empty, with_sequence = SchedulerHarness(4), SchedulerHarness(4)
    for harness in (empty, with_sequence):
        scheduler = harness.scheduler
        assert (scheduler.starved, scheduler.owes_blocks) == (False, False)
        assert (scheduler.preemptions, scheduler.spare) == (0, 0)
    assert empty.step() == {}
    with_sequence.add("a", 4)  # not scheduled yet
    assert not with_sequence.scheduler.owes_blocks
    assert with_sequence.step() == {"a": 4}


def test_a_long_prompt_is_computed_in_pieces_of_the_budget() -> None:
    harness = SchedulerHarness(2000, budget=2048)
    harness.add("a", 5000)
    assert [harness.step() for _ in range(4)] == [{"a": 2048}, {"a": 2048}, {"a": 904}, {"a": 1}]


def test_a_prompt_that_is_published_takes_small_pieces_and_leaves_the_budget_to_others() -> None:
    harness = SchedulerHarness(5000, budget=8192)
    harness.add("published", 5000, track=True)
    harness.add("other", 5000)
    steps = [{"published": 2048, "other": 5000}, {"published": 2048, "other": 1}]
    assert [harness.step() for _ in steps] == steps


def test_decode_has_priority_over_chunked_prefill() -> None:
    harness = SchedulerHarness(2000, budget=2048)
    for index in range(48):
        harness.add(f"d{index}", 1)
    harness.step()
    harness.add("long", 5000)
    pieces = [harness.step() for _ in range(3)]
    assert [step["long"] for step in pieces] == [2000, 2000, 1000]
    assert all(len(step) == 49 for step in pieces)


def test_an_older_prefill_does_not_starve_a_younger_decode() -> None:
    harness = SchedulerHarness(100, budget=10)
    old = harness.add("old", 4)
    harness.step()
    harness.add("young", 1)
    harness.step()
    old.tokens += [1] * 40  # like a preempted sequence that has to compute many tokens again
    old.blocks += harness.pool.allocate(20)
    assert harness.step() == {"young": 1, "old": 9}


def test_the_rest_of_the_budget_goes_to_waiting_requests_in_order() -> None:
    harness = SchedulerHarness(100, budget=10)
    for name in "abc":
        harness.add(name, 4)
    assert harness.step() == {"a": 4, "b": 4, "c": 2}
    assert harness.step() == {"a": 1, "b": 1, "c": 2}


def test_the_token_budget_limits_the_number_of_running_sequences() -> None:
    harness = SchedulerHarness(100, budget=2)
    _, b, _ = (harness.add(name, 1) for name in "abc")
    assert harness.step() == {"a": 1, "b": 1}
    assert harness.step() == {"a": 1, "b": 1}
    assert harness.waiting == ["c"]
    harness.finish(b)
    assert harness.step() == {"a": 1, "c": 1}


def test_max_num_seqs_limits_the_number_of_running_sequences() -> None:
    harness = SchedulerHarness(100, seqs=2)
    a, _, _ = (harness.add(name, 4) for name in "abc")
    assert harness.step() == {"a": 4, "b": 4}
    assert harness.step() == {"a": 1, "b": 1}
    harness.finish(a)
    assert harness.step() == {"b": 1, "c": 4}


def test_the_oldest_waiting_request_blocks_younger_ones_if_it_does_not_fit() -> None:
    harness = SchedulerHarness(4)
    harness.add("first", 4)
    harness.step()
    harness.add("big", 16)
    harness.add("small", 1)
    assert harness.step() == {"first": 1}
    assert harness.waiting == ["big", "small"]
    assert harness.scheduler.owes_blocks
    assert not harness.scheduler.starved


def test_a_request_that_holds_its_blocks_overtakes_one_that_does_not_fit() -> None:
    harness = SchedulerHarness(4)
    harness.add("first", 4)
    harness.step()
    harness.add("big", 16)
    harness.add_holding("holder", 4)
    assert harness.step() == {"first": 1, "holder": 4}
    assert harness.waiting == ["big"]


def test_the_youngest_sequences_are_preempted_and_wait_in_order() -> None:
    """5 blocks of 4 tokens: r1 and r2 fill 2 each, r3 fills 1. r1 needs another block. The step
    preempts r3, and then r2, which is the youngest running sequence by then. A step that preempts
    admits no sequence."""
    harness = SchedulerHarness(5)
    harness.add("r1", 8)
    r2, r3 = harness.add("r2", 8), harness.add("r3", 4)
    harness.step()
    assert harness.pool.num_free == 0
    assert harness.step() == {"r1": 1}
    assert harness.waiting == ["r2", "r3"]
    assert (r2.computed, r2.blocks, r3.computed, r3.known) == (0, [], 0, 5)
    assert harness.scheduler.preemptions == 2
    assert harness.scheduler.starved
    # r2's two cached blocks are free, so they count as demand: 1 + 2 > 2 free blocks.
    assert harness.pool.lookup(r2.hashes_of(2)) == [3, 4]
    assert harness.step() == {"r1": 1}
    assert harness.waiting == ["r2", "r3"]
    assert not harness.scheduler.starved


def test_a_preempted_request_reuses_its_cached_blocks() -> None:
    harness = SchedulerHarness(5)
    r1, r2 = harness.add("r1", 8), harness.add("r2", 8)
    harness.step()
    harness.step()  # r1 takes the free block, and r2 is preempted
    assert harness.running == ["r1"]
    harness.finish(r1)
    assert harness.step() == {"r2": 1}
    assert (r2.computed, r2.registered_spans) == (9, 2)


def test_a_step_that_preempts_admits_no_sequence() -> None:
    harness = SchedulerHarness(4, seqs=2)
    older = harness.sequence("older", 1)  # like a choice that is queued after its prompt
    harness.add("r1", 8)
    harness.add("r2", 8)
    assert harness.step() == {"r1": 8, "r2": 8}
    harness.scheduler.add(older)
    assert harness.step() == {"r1": 1}
    assert harness.pool.num_free == 1
    assert harness.waiting == ["older", "r2"]
    assert harness.step() == {"r1": 1, "older": 1}


def test_waiting_sequences_lose_their_blocks_before_running_ones() -> None:
    harness = SchedulerHarness(6, seqs=2)
    harness.add("r1", 8)
    harness.add("r2", 7)
    harness.step()
    harness.add_holding("q1", 4)
    q2 = harness.add_holding("q2", 4)
    assert harness.step() == {"r1": 1, "r2": 1}
    assert harness.running == ["r1", "r2"]
    assert harness.waiting == ["q1", "q2"]
    assert q2.blocks == []
    assert harness.scheduler.preemptions == 1


def test_waiting_sequences_that_need_each_others_blocks_do_not_deadlock() -> None:
    harness = SchedulerHarness(4)
    a = harness.add_holding("a", 9, blocks=2)
    b = harness.add_holding("b", 9, blocks=2)
    assert harness.step() == {"a": 9}
    assert (len(a.blocks), b.blocks) == (3, [])
    assert harness.scheduler.starved


def test_while_a_step_is_in_flight_waiting_sequences_keep_their_blocks() -> None:
    harness = SchedulerHarness(4)
    a = harness.add_holding("a", 9, blocks=2)
    b = harness.add_holding("b", 9, blocks=2)
    assert harness.scheduler.schedule(ahead=True) == []
    assert (len(a.blocks), len(b.blocks), harness.scheduler.preemptions) == (2, 2, 0)
    assert not harness.scheduler.starved


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(1, {"long": 9}), (2, {"short": 1, "long": 9})]
)
def test_a_step_ahead_omits_a_sequence_that_finishes_with_the_step_in_flight(
    max_tokens: int, expected: dict[str, int]
) -> None:
    harness = SchedulerHarness(100, budget=10)
    harness.add("short", 4, max_tokens=max_tokens)
    harness.add("long", 20)
    assert harness.launch() == {"short": 4, "long": 6}
    assert harness.launch(ahead=True) == expected


def test_a_step_ahead_is_empty_if_any_sequence_lacks_a_block() -> None:
    harness = SchedulerHarness(4)
    harness.add("fits", 7)
    harness.add("lacks", 8)
    assert harness.step() == {"fits": 7, "lacks": 8}
    assert harness.scheduler.schedule(ahead=True) == []
    assert harness.scheduler.preemptions == 0


def test_while_a_step_is_in_flight_no_sequence_is_preempted() -> None:
    harness = SchedulerHarness(4)
    harness.add("a", 8)
    b = harness.add("b", 8)
    harness.step()
    assert harness.scheduler.schedule(ahead=True) == []
    assert (len(b.blocks), harness.scheduler.preemptions) == (2, 0)
    assert harness.step() == {"a": 1}


def test_a_lone_request_waits_while_parked_blocks_prevent_its_growth() -> None:
    harness = SchedulerHarness(3)
    harness.add("a", 8)
    harness.step()
    parked = harness.pool.allocate(1)
    assert harness.step() == {}
    assert harness.scheduler.starved
    assert harness.step() == {}
    assert harness.scheduler.starved
    harness.pool.release(parked)
    assert harness.step() == {"a": 1}
    assert not harness.scheduler.starved


def test_an_admission_leaves_a_watermark_free_while_others_run() -> None:
    harness = SchedulerHarness(200)
    a = harness.add("a", 4)
    harness.step()
    harness.add("b", 4 * 198)
    assert harness.step() == {"a": 1}
    assert harness.scheduler.spare == 2
    harness.finish(a)
    assert harness.step() == {"b": 4 * 198}


def test_hits_in_the_free_queue_are_not_counted_as_free_blocks() -> None:
    harness = SchedulerHarness(3)
    a = harness.add("a", 8)
    harness.step()
    harness.finish(a)
    other = harness.pool.allocate(1)
    harness.pool.touch(other)
    again = harness.sequence("a", 8)
    again.tokens.append(1)
    harness.scheduler.add(again)  # needs 2 hits in the free queue and 1 new block, but 2 are free
    assert harness.step() == {}
    assert harness.pool.num_free == 2


def test_removing_a_waiting_sequence_returns_its_blocks() -> None:
    harness = SchedulerHarness(4)
    holder = harness.add_holding("a", 8)
    plain = harness.add("b", 4)
    harness.finish(holder)
    harness.finish(plain)
    assert harness.pool.num_free == 4
    assert not harness.waiting
    harness.pool.check_integrity({})


def test_sequences_lists_running_sequences_first() -> None:
    harness = SchedulerHarness(10, seqs=1)
    harness.add("a", 4)
    harness.step()
    harness.add("b", 4)
    assert harness.names(list(harness.scheduler.sequences())) == ["a", "b"]


# --- options --------------------------------------------------------------------------------------

THRESHOLD = {"long_prefill_token_threshold": 30}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [{"d": 1, "a": 90, "b": 9}, {"d": 1, "a": 1, "b": 61, "c": 8}]),
        (THRESHOLD, [{"d": 1, "a": 30, "b": 30, "c": 8}, {"d": 1, "a": 30, "b": 30, "c": 1}]),
        (
            THRESHOLD | {"max_long_partial_prefills": 1},
            [
                {"d": 1, "a": 30, "c": 8},
                {"d": 1, "a": 30, "c": 1},
                {"d": 1, "a": 30, "b": 30, "c": 1},
            ],
        ),
        (
            THRESHOLD | {"max_num_partial_prefills": 1},
            [
                {"d": 1, "a": 30, "c": 8},
                {"d": 1, "a": 30, "c": 1},
                {"d": 1, "a": 30, "b": 30, "c": 1},
            ],
        ),
        (
            {"enable_chunked_prefill": False},
            [{"d": 1, "a": 90}, {"d": 1, "a": 1, "b": 70, "c": 8}],
        ),
    ],
)
def test_options_limit_the_prompts_of_a_step(
    options: dict[str, Any], steps: list[dict[str, int]]
) -> None:
    harness = SchedulerHarness(1000, budget=100, **options)
    harness.add("d", 1)
    harness.step()
    for name, prompt in (("a", 90), ("b", 70), ("c", 8)):
        harness.add(name, prompt)
    assert [harness.step() for _ in steps] == steps


def test_no_threshold_holds_for_a_prompt_that_is_alone() -> None:
    harness = SchedulerHarness(1000, budget=100, **THRESHOLD)
    harness.add("a", 150)
    assert harness.step() == {"a": 100}
    harness.add("b", 50)
    assert harness.step() == {"a": 30, "b": 30}


@pytest.mark.parametrize("running", [False, True])
def test_a_prompt_in_one_piece_is_cut_only_if_no_step_has_room_for_it(running: bool) -> None:
    """The limit of a step was lowered, because the device lacks memory."""
    harness = SchedulerHarness(1000, budget=10, enable_chunked_prefill=False)
    if running:
        decoding = harness.add("d", 1)
        harness.step()
    harness.add("a", 25)
    harness.add("b", 3)
    if running:
        assert [harness.step() for _ in range(3)] == [{"d": 1}] * 3
        harness.finish(decoding)
    steps = [{"a": 10}, {"a": 10}, {"a": 5, "b": 3}]
    assert [harness.step() for _ in steps] == steps


def test_with_priorities_the_lowest_number_goes_first_and_equal_ones_in_order() -> None:
    for policy, order in (("fcfs", ["a", "b", "c", "d"]), ("priority", ["c", "b", "d", "a"])):
        harness = SchedulerHarness(1000, seqs=1, scheduling_policy=policy)
        for name, priority in (("a", 5), ("b", 0), ("c", -3), ("d", 0)):
            harness.add(name, 4, priority=priority)
        served: list[str] = []
        while harness.scheduler.waiting:
            served += harness.step()
            harness.finish(harness.scheduler.running[0])
        assert served == order, policy


@pytest.mark.parametrize(
    ("policy", "victims"), [("fcfs", ["r4", "r3"]), ("priority", ["r3", "r2"])]
)
def test_the_victim_has_the_largest_priority_and_then_the_latest_arrival_O_SCH_14(
    policy: str, victims: list[str]
) -> None:
    """The oracle's requests, in order of arrival: R4 (5, 1), R2 (10, 3), R1 (0, 5), R3 (10, 7)."""
    harness = SchedulerHarness(8, scheduling_policy=policy)
    arrivals = (("r4", 5), ("r2", 10), ("r1", 0), ("r3", 10))
    if policy == "fcfs":  # the last in running
        arrivals = (("r1", 0), ("r2", 10), ("r3", 10), ("r4", 5))
    for name, priority in arrivals:
        harness.add(name, 2 * BLOCK, priority=priority)
    harness.step()
    assert harness.scheduler.preemptions == 0
    before = list(harness.running)
    harness.step()
    assert [name for name in before if name not in harness.running] == sorted(
        victims, key=before.index
    )
    assert harness.scheduler.preemptions == 2


def test_under_priority_a_waiting_sequence_keeps_its_blocks_if_a_running_one_is_less_urgent() -> (
    None
):
    for policy, preempted in (("fcfs", "held"), ("priority", "last")):
        harness = SchedulerHarness(4, seqs=2, scheduling_policy=policy)
        harness.add("first", BLOCK)
        harness.add("last", BLOCK, priority=9)
        harness.step()
        held = harness.add_holding("held", 2 * BLOCK, priority=1)
        harness.step()
        assert harness.scheduler.preemptions == 1
        assert bool(held.blocks) == (preempted == "last")
        assert ("last" in harness.running) == (preempted == "held")


class ShortestFirst(Scheduler):
    """A scheduler of another package."""

    def order_of(self, sequence: Sequence) -> tuple[int, ...]:
        return (sequence.known, *sequence.key)


def test_another_class_orders_sequences_in_its_own_way() -> None:
    name = f"{__name__}:ShortestFirst"
    engine, runner = scripted(scheduling=SchedulingOptions(scheduler_cls=name), max_num_seqs=1)
    run = run_all(engine, [make_request(name, size) for name, size in (("a", 9), ("b", 3))])
    assert [len(rows[0].tokens) for rows in runner.steps if len(rows[0].tokens) > 1] == [3, 9]
    assert sorted(run.finished) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("baton_engine.llm.LLM", "--scheduler-cls baton_engine.llm.LLM is not of the form MODULE:"),
        ("nowhere:Class", "nowhere:Class cannot be imported: No module named 'nowhere'"),
        ("baton_engine.scheduling.scheduler:Nobody", "cannot be imported: .*Nobody"),
        ("baton_engine.scheduling.scheduler:Piece", "is no subclass of baton_engine.scheduling"),
    ],
)
def test_a_wrong_scheduler_class_is_an_error_that_names_it(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        build_sim(SimSettings(scheduling=SchedulingOptions(scheduler_cls=name)))
