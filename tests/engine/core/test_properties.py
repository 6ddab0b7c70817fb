"""With random requests, pools, host tiers and budgets: every request finishes, no block leaks, and
the ids equal those of each request alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.core.engine_core import EngineCore
from baton_engine.errors import PinRefused
from baton_engine.interface import Reservation
from baton_engine.speculation.draft_kv import DraftKV
from baton_engine.speculation.drafter import Drafter
from baton_protocol.errors import PromptTooLong
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.layout import KVGroup
from baton_protocol.request import Request
from tests.support.engines.engine_core import Run, drive, make_request, run_all, step_once
from tests.support.engines.landing import (
    BLOCK,
    GROUPS,
    DeviceLostError,
    host_bytes,
    land,
    sim,
    watched_sim,
)
from tests.support.engines.proposers import Guesses, drafter, sim_draft_model

MAX_STEPS = 4000
ACTIONS = [
    "park",
    "submit",
    "step",
    "step",
    "abort",
    "stop",
    "fail",
    "unhold",
    "reset",
    "pin",
    "unpin",
]
LANDED = st.sets(st.integers(0, 9))  # indexes of the spans that land
Groups = tuple[KVGroup, ...]
# How many of 10 drafts are right; None: no drafts; "model": a draft model drafts, with few blocks.
Right = int | Literal["model"] | None
RIGHT = st.sampled_from([None, 0, 5, 9, 10, "model"])
# Blocks per group for a request that is alone: the prompt and 20 tokens of each of 3 choices.
BLOCKS_ALONE = 40
# Blocks of the host tier: none, fewer than a request has, about as many as the pool, and more than
# all requests need.
HOST = st.sampled_from([0, 1, 3, 12, 400]).map(host_bytes)
SCHEDULING = st.one_of(
    st.builds(
        SchedulingOptions,
        scheduling_policy=st.sampled_from(["fcfs", "priority"]),
        long_prefill_token_threshold=st.just(5),
        max_num_partial_prefills=st.sampled_from([None, 1, 2]),
        max_long_partial_prefills=st.sampled_from([None, 1]),
        enable_prefix_caching=st.booleans(),
        max_pinned_fraction=st.sampled_from([0.25, 1.0]),
    ),
    st.builds(
        SchedulingOptions,
        enable_chunked_prefill=st.booleans(),
        enable_prefix_caching=st.booleans(),
        max_pinned_fraction=st.sampled_from([0.25, 1.0]),
    ),
)


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Up to 7 requests. Their prompts are prefixes of 3 texts, so requests share prefixes."""
    texts = [[(17 * text + index * index) % 250 for index in range(24)] for text in range(3)]
    drawn = []
    for index in range(draw(st.integers(1, 7))):
        text = texts[draw(st.integers(0, 2))]
        drawn.append(
            make_request(
                f"r{index}",
                text[: draw(st.integers(1, len(text)))],
                n=draw(st.integers(1, 3)),
                max_tokens=draw(st.integers(1, 20)),
                temperature=draw(st.sampled_from([0.0, 1.0])),
                seed=draw(st.integers(0, 3)),
                priority=draw(st.integers(-1, 1)),
                **draw(st.one_of(optional_params(), optional_params(), beam_params())),
            )
        )
    return drawn


@st.composite
def optional_params(draw: st.DrawFn) -> dict[str, Any]:
    """Sometimes parameters that change logits. They concern 5 ids, so they often have an effect."""
    ids = st.integers(40, 44)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "repetition_penalty": st.just(1.5),
        "frequency_penalty": st.sampled_from([-1.0, 1.5]),
        "presence_penalty": st.just(1.0),
        "logit_bias": st.lists(st.tuples(ids, st.floats(-9, 9)), max_size=3).map(tuple),
        "allowed_token_ids": st.just((40, 41, 42, 43, 44)),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(
            tuple
        ),
        "prompt_logprobs": st.integers(0, 2),
        "skip_reading_prefix_cache": st.just(True),
    }
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    return {name: draw(fields[name]) for name in names}


@st.composite
def beam_params(draw: st.DrawFn) -> dict[str, Any]:
    """A beam search: `n` beams instead of `n` choices."""
    return {
        "use_beam_search": True,
        "length_penalty": draw(st.sampled_from([0.0, 1.0, 2.0])),
        "early_stopping": draw(st.sampled_from([False, True, "never"])),
    }


@cache
def run_alone(request: bytes, groups: Groups, eos_every: int) -> Run:
    """The run of a request (as JSON) that is alone on an engine. Requests return in many examples:
    hypothesis varies a part of one."""
    engine = sim(**pool_of(BLOCKS_ALONE, groups), eos_every=eos_every)
    return run_all(engine, [msgspec.json.decode(request, type=Request)])


def alone(request: Request, groups: Groups, eos_every: int = 0) -> Run:
    return run_alone(msgspec.json.encode(request), groups, eos_every)


def ids_alone(
    wanted: list[Request], groups: Groups, eos_every: int = 0
) -> dict[tuple[str, int], list[int]]:
    ids = {}
    for request in wanted:
        ids.update(alone(request, groups, eos_every).all_ids())
    return ids


@dataclass(frozen=True)
class Drafts:
    """What drafts in an engine, and the KV of a draft model."""

    drafter: Drafter | None = None
    kv: DraftKV | None = None

    @classmethod
    def of(
        cls, answers: Mapping[tuple[str, int], Sequence[int]], right: Right, groups: Groups
    ) -> Drafts:
        if right is None:
            return cls()
        if right == "model":
            model = sim_draft_model(budget=7, **pool_of(11, groups))
            return cls(drafter(model), model.kv)
        return cls(drafter(Guesses(answers, right)))

    def check_ended(self) -> None:
        """No sequence runs, so the draft model holds no blocks."""
        if self.kv is not None:
            self.kv.check_integrity()
            assert self.kv.num_free == self.kv.num_blocks


def pool_of(blocks: int, groups: Groups) -> dict[str, Any]:
    """Settings for `blocks` blocks per group."""
    return {"num_blocks": blocks * max(1, len(groups)), "groups": groups}


@given(
    wanted=requests(),
    groups=st.sampled_from(GROUPS),
    blocks=st.integers(10, 40),
    host=HOST,
    budget=st.sampled_from([1, 3, 7, 64]),
    seqs=st.integers(1, 8),
    eos_every=st.sampled_from([0, 5]),
    overlap=st.booleans(),
    right=RIGHT,
    scheduling=SCHEDULING,
)
@settings(max_examples=150)
def test_ids_do_not_depend_on_the_pool_host_tier_budget_batch_or_overlap(
    wanted: list[Request],
    groups: Groups,
    blocks: int,
    host: int,
    budget: int,
    seqs: int,
    eos_every: int,
    overlap: bool,
    right: Right,
    scheduling: SchedulingOptions,
) -> None:
    answers = ids_alone(wanted, groups=groups, eos_every=eos_every)
    drafts = Drafts.of(answers, right, groups)
    engine, _ = watched_sim(
        drafts.drafter,
        **pool_of(blocks, groups),
        host_kv_memory=host,
        max_batched_tokens=budget,
        max_num_seqs=seqs,
        eos_every=eos_every,
        overlap=overlap,
        scheduling=scheduling,
    )
    run = Run()
    for request in wanted:
        engine.submit(request, track=len(request.prompt_ids) % 2 == 0)
    drive(engine, MAX_STEPS, into=run)
    assert run.all_ids() == answers
    assert sorted(run.finished) == sorted(request.id for request in wanted)
    for request in wanted:
        assert sum(run.use(request.id)) + run.from_host(request.id) == len(request.prompt_ids)
        if request.params.prompt_logprobs is not None:
            expected = alone(request, groups, eos_every).prompt_logprobs(request.id)
            assert run.prompt_logprobs(request.id) == expected
            assert len(expected) == len(request.prompt_ids) - 1
    load = engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)
    drafts.check_ended()


@given(
    wanted=requests(),
    groups=st.sampled_from(GROUPS),
    cut=st.integers(0, 20),
    blocks=st.integers(10, 40),
    host=HOST,
    overlap=st.booleans(),
    right=RIGHT,
)
@settings(max_examples=50)
def test_a_resumed_request_continues_as_if_undisturbed(
    wanted: list[Request],
    groups: Groups,
    cut: int,
    blocks: int,
    host: int,
    overlap: bool,
    right: Right,
) -> None:
    whole = ids_alone(wanted, groups=groups)
    drafts = Drafts.of(whole, right, groups)
    engine, _ = watched_sim(
        drafts.drafter,
        **pool_of(blocks, groups),
        host_kv_memory=host,
        max_batched_tokens=9,
        overlap=overlap,
    )
    known = {}
    for request in wanted:
        # Choices are cut at different lengths. Some have no tokens, and some are complete.
        known[request.id] = tuple(
            tuple(whole[request.id, choice][: max(0, cut - 3 * choice)])
            for choice in range(request.params.n)
        )
        engine.submit(msgspec.structs.replace(request, outputs=known[request.id]))
    run = drive(engine, MAX_STEPS)
    for (name, choice), ids in whole.items():
        new = [token for token in run.tokens if (token.request, token.choice) == (name, choice)]
        have = known[RequestId(name)][choice]
        assert [*have, *(token.id for token in new)] == ids
        assert [token.offset for token in new] == list(range(len(have), len(ids)))
    assert sorted(run.finished) == sorted(known)
    drafts.check_ended()


@dataclass
class Parked:
    request: Request
    reservation: Reservation


class NodeLoop:
    """A step loop like a node's. It parks requests, copies KV from a donor into their blocks,
    submits and aborts requests, holds blocks, and releases blocks when the engine is starved."""

    def __init__(self, engine: EngineCore, donor: EngineCore) -> None:
        self.engine = engine
        self.donor = donor
        self.parked: list[Parked] = []
        self.unparked: list[Request] = []
        self.held: list[list[BlockId]] = []
        self.run = Run()
        self.aborted: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()

    def park(self, request: Request) -> None:
        reservation = self.engine.reserve(request)
        if reservation is None:
            self.unparked.append(request)
        else:
            self.parked.append(Parked(request, reservation))

    def submit(self, parked: Parked, wanted: Iterable[int], windowed: Iterable[int]) -> None:
        """Submit a parked request. Wanted spans that the donor still has land, the others are
        holes. Those that are not in `windowed` land without the groups with a window."""
        self.parked.remove(parked)
        request, reservation = parked.request, parked.reservation
        found = land(self.engine, reservation, self.donor, wanted, windowed)
        self.engine.submit(
            request,
            reservation=reservation,
            landed=found.landed,
            window_landed=found.window_landed,
            track=True,
            report_filled=True,
        )

    def step(self) -> None:
        try:
            result = step_once(self.engine, self.run)
        except DeviceLostError:
            return  # a later call repeats the step
        for progress in result.progress:
            groups = self.engine.info.layout.num_groups
            self.hold(progress.blocks[: progress.computed // BLOCK * groups])
        for filled in result.filled:
            self.hold(filled.blocks)
        if self.engine.starved():
            if self.parked:
                youngest = self.parked.pop()
                self.engine.release(youngest.reservation)
                self.unparked.append(youngest.request)
            elif self.held:
                self.engine.unhold(self.held.pop(0))

    def hold(self, blocks: Sequence[BlockId]) -> None:
        self.engine.hold(blocks)
        self.held.append(list(blocks))

    def settle(self) -> None:
        for _ in range(MAX_STEPS):
            if not (self.parked or self.unparked or self.engine.has_work()):
                break
            for parked in list(self.parked):
                self.submit(parked, range(99), range(5, 99))
            for request in self.unparked:
                self.engine.submit(request)
            self.unparked.clear()
            self.step()
        for blocks in self.held:
            self.engine.unhold(blocks)
        self.engine.check_integrity()


@given(
    wanted=requests(),
    groups=st.sampled_from(GROUPS),
    blocks=st.integers(10, 24),
    host=HOST,
    overlap=st.booleans(),
    right=RIGHT,
    scheduling=SCHEDULING,
    data=st.data(),
)
@settings(max_examples=100)
def test_any_order_of_reservations_landings_aborts_and_failures_changes_no_ids(
    wanted: list[Request],
    groups: Groups,
    blocks: int,
    host: int,
    overlap: bool,
    right: Right,
    scheduling: SchedulingOptions,
    data: st.DataObject,
) -> None:
    whole = ids_alone(wanted, groups=groups)
    donor = sim(groups=groups)
    run_all(donor, wanted)
    drafts = Drafts.of(whole, right, groups)
    engine, runner = watched_sim(
        drafts.drafter,
        **pool_of(blocks, groups),
        host_kv_memory=host,
        max_batched_tokens=8,
        max_num_seqs=4,
        overlap=overlap,
        scheduling=scheduling,
    )
    loop = NodeLoop(engine, donor)
    todo = list(wanted)
    for _ in range(data.draw(st.integers(0, 25))):
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "park" and todo:
            loop.park(todo.pop(0))
        elif action == "submit" and loop.parked:
            parked = data.draw(st.sampled_from(loop.parked))
            loop.submit(parked, data.draw(LANDED), data.draw(LANDED))
        elif action == "abort":
            name = data.draw(st.sampled_from([request.id for request in wanted]))
            if name not in [parked.request.id for parked in loop.parked]:
                loop.engine.abort(name)
                loop.aborted.add(name)
        elif action == "stop":
            request = data.draw(st.sampled_from(wanted))
            choice = data.draw(st.integers(0, request.params.n - 1))
            loop.engine.finish_choice(request.id, choice)
            loop.stopped.add((request.id, choice))
        elif action == "fail":
            runner.fails = data.draw(st.sampled_from(["launch", "read"]))
        elif action == "unhold" and loop.held:
            loop.engine.unhold(loop.held.pop())
        elif action == "reset":
            loop.engine.reset_prefix_cache()
            assert loop.engine.cached_chunks() == ()
        elif action == "pin":
            request = data.draw(st.sampled_from(wanted))
            with suppress(PinRefused):
                loop.engine.pins.pin(request.id, loop.engine.block_hashes(request))
        elif action == "unpin":
            loop.engine.pins.unpin(data.draw(st.sampled_from(wanted)).id)
        else:
            loop.step()
        loop.engine.check_integrity()
    loop.unparked += todo
    loop.settle()
    loop.engine.pins.clear()
    load = loop.engine.load()
    assert (load.running, load.waiting, load.free_blocks) == (0, 0, load.total_blocks)
    drafts.check_ended()
    for key, ids in loop.run.all_ids().items():
        if key in loop.stopped:
            assert ids == whole[key][: len(ids)]
        elif key[0] not in loop.aborted:
            assert ids == whole[key]
    assert {request.id for request in wanted} - set(loop.run.finished) <= loop.aborted


@given(
    length=st.integers(1, 60),
    groups=st.sampled_from(GROUPS),
    blocks=st.integers(1, 12),
    max_len=st.integers(2, 60),
)
@settings(max_examples=60)
def test_a_request_is_refused_at_submit_or_runs_to_its_limit(
    length: int, groups: Groups, blocks: int, max_len: int
) -> None:
    engine = sim(**pool_of(blocks, groups), max_model_len=max_len)
    request = make_request("a", length, max_tokens=100)
    limit = min(max_len, blocks * BLOCK)
    try:
        engine.submit(request)
    except PromptTooLong:
        assert length >= limit
        assert not engine.has_work()
        return
    run = drive(engine, MAX_STEPS)
    assert length + len(run.ids("a")) == limit
    assert run.last("a").finish == "length"
