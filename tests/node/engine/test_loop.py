"""A single step loop: refusals, duplicates, reports, drain, and blocks of parked requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest

from baton_engine.config.scheduling_options import SchedulingOptions
from baton_engine.interface import PARTS
from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.ipc.messages import Drain, Drained, FinishChoice, Saved, Sleep, Slept, WakeUp
from baton_protocol.ids import BlockHash
from baton_protocol.link import (
    Abort,
    CacheEvents,
    FirstTokens,
    Load,
    PrefillJob,
    ResetPrefixCache,
    RunJob,
)
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import (
    NOBODY,
    LoopNode,
    hand_off,
    run_alone,
    settle,
    spin,
    store_node,
)

PROMPT = bytes((i * 5) % 95 + 32 for i in range(150))


@pytest.fixture
def node() -> Iterator[LoopNode]:
    node = LoopNode("n0")
    yield node
    settle([node])
    node.close()


def test_a_duplicate_of_a_job_changes_nothing(node: LoopNode) -> None:
    request = make_request("r", PROMPT)
    node.take(RunJob(request), RunJob(request))
    spin([node], lambda: len(node.ids("r")) > 2, "some tokens")
    node.take(RunJob(request))
    settle([node])
    assert len(node.ids("r")) == 8


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_ids": (1, -1)},
        {"prompt_ids": (1, 259)},
        {"prompt_ids": ()},
        {"outputs": ((), ())},
        {"outputs": ((70000,),)},
    ],
)
def test_a_request_with_impossible_ids_is_refused(node: LoopNode, bad: dict[str, Any]) -> None:
    request = msgspec.structs.replace(make_request("r", PROMPT), **bad)
    node.take(RunJob(request))
    spin([node], lambda: bool(node.failures()), "the refusal")
    assert node.failures()[0].error.status == 400


def test_first_tokens_with_impossible_ids_fail_only_their_request(node: LoopNode) -> None:
    request = make_request("r", PROMPT)
    node.take(RunJob(request, await_first=True), FirstTokens(request.id, 1, ((-5,),)))
    spin([node], lambda: bool(node.failures()), "the refusal")
    assert run_alone(node, make_request("other", PROMPT))


def test_a_prompt_that_can_never_fit_is_refused_with_the_limit(node: LoopNode) -> None:
    request = make_request("r", bytes(8192))
    node.take(RunJob(request))
    spin([node], lambda: bool(node.failures()), "the refusal")
    failure = node.failures()[0]
    assert failure.error.code == "context_length_exceeded"
    assert not failure.error.retryable
    assert "8192" in failure.error.message


def test_a_prefill_job_that_can_never_fit_is_refused(node: LoopNode) -> None:
    node.take(PrefillJob(make_request("r", bytes(8192)), *NOBODY))
    spin([node], lambda: bool(node.failures()), "the refusal")
    assert node.failures()[0].error.code == "context_length_exceeded"


def test_a_prefill_job_emits_one_token_per_choice(node: LoopNode) -> None:
    request = make_request("r", PROMPT, n=3, temperature=1.0, seed=1)
    node.take(PrefillJob(request, *NOBODY))
    spin([node], lambda: len(node.tokens("r")) == 3, "the first tokens")
    settle([node])
    assert sorted(token.choice for token in node.tokens("r")) == [0, 1, 2]


def test_a_finished_choice_emits_no_more_tokens(node: LoopNode) -> None:
    request = make_request("r", PROMPT, max_tokens=4000)
    node.take(RunJob(request))
    spin([node], lambda: len(node.ids("r")) > 3, "some tokens")
    node.take(FinishChoice(request.id, 1, 0))
    node.loop.turn()
    count = len(node.ids("r"))
    settle([node])
    assert len(node.ids("r")) == count


def test_first_tokens_that_end_every_choice_leave_nothing_to_run(node: LoopNode) -> None:
    request = make_request("r", PROMPT)
    node.take(RunJob(request, await_first=True))
    node.take(FirstTokens(request.id, 1, ((65,),), finished=(0,)))
    settle([node])
    assert not node.tokens("r")


def test_a_choice_that_ended_on_the_prefill_node_does_not_run(node: LoopNode) -> None:
    request = make_request("r", PROMPT, n=2, seed=3, temperature=1.0)
    node.take(RunJob(request, await_first=True))
    node.take(FirstTokens(request.id, 1, ((65,), (66,)), finished=(0,)))
    spin([node], lambda: len(node.ids("r", 1)) == 7, "the other choice")
    assert not node.ids("r", 0)
    assert node.tokens("r")[0].offset == 1


def test_a_choice_that_ended_in_an_earlier_attempt_does_not_run(node: LoopNode) -> None:
    request = make_request("r", PROMPT, n=2, seed=3, temperature=1.0, attempt=2)
    request = msgspec.structs.replace(request, outputs=((65,), (66, 67)))
    node.take(RunJob(request, finished=(0,)))
    spin([node], lambda: len(node.ids("r", 1)) == 6, "the other choice")
    settle([node])
    assert not node.ids("r", 0)
    assert node.tokens("r")[0].offset == 2
    assert not node.failures()


def test_a_choice_that_arrives_with_all_its_tokens_only_ends(node: LoopNode) -> None:
    request = make_request("r", PROMPT, n=2, max_tokens=2)
    request = msgspec.structs.replace(request, outputs=((65, 66), (65,)))
    node.take(RunJob(request))
    spin([node], lambda: len(node.tokens("r")) == 2, "both ends")
    settle([node])
    ends = [(token.choice, token.offset, token.finish) for token in node.tokens("r")]
    assert sorted(ends) == [(0, 2, "length"), (1, 1, "length")]
    assert node.ids("r", 0) == []
    assert not node.failures()


def test_frames_for_another_attempt_are_ignored(node: LoopNode) -> None:
    request = make_request("r", PROMPT, attempt=2)
    node.take(RunJob(request, await_first=True))
    node.take(FirstTokens(request.id, 1, ((65,),)), Abort(request.id, 1))
    for _ in range(5):
        node.loop.turn()
    assert not node.tokens("r")
    node.take(FirstTokens(request.id, 2, ((65,),)))
    spin([node], lambda: len(node.ids("r")) == 7, "the end")


def test_load_and_cache_events_are_reported(node: LoopNode) -> None:
    run_alone(node, make_request("r", PROMPT))
    spin([node], lambda: any(isinstance(f, CacheEvents) for f in node.port.sent), "cache events")
    events = [frame for frame in node.port.sent if isinstance(frame, CacheEvents)]
    assert {chunk for event in events for chunk in event.stored} == set(node.engine.cached_chunks())

    def reported() -> bool:
        loads = [frame for frame in node.port.sent if isinstance(frame, Load)]
        return bool(loads) and loads[-1].load.generated_tokens_total == 8

    spin([node], reported, "the load after the request")


def test_a_drain_is_answered_when_the_last_request_has_ended(node: LoopNode) -> None:
    request = make_request("r", PROMPT, max_tokens=50)
    node.take(RunJob(request), Drain())
    node.loop.turn()
    assert Saved() in node.port.sent  # without a store there is nothing to wait for
    assert Drained() not in node.port.sent
    spin([node], lambda: Drained() in node.port.sent, "the answer")
    assert len(node.ids("r")) == 50


def test_an_engine_sleeps_when_its_last_request_has_ended_and_refuses_jobs_until_it_wakes_up(
    node: LoopNode,
) -> None:
    request = make_request("r", PROMPT, max_tokens=20)
    node.take(RunJob(request), Sleep(1))
    node.loop.turn()
    assert not node.engine.is_sleeping
    spin([node], lambda: Slept(PARTS) in node.port.sent, "the answer")
    assert len(node.ids("r")) == 20
    node.take(RunJob(make_request("early", PROMPT)))
    spin([node], lambda: bool(node.failures()), "the refusal")
    assert node.failures()[0].error.retryable
    node.take(Sleep(2), WakeUp(()))  # the second one cancels the first
    node.loop.turn()
    node.take(WakeUp(PARTS))
    spin([node], lambda: Slept() in node.port.sent, "the wake-up")
    again = make_request("again", PROMPT, max_tokens=20)
    assert run_alone(node, again) == [node.ids("r")]


@pytest.mark.integration
def test_a_parked_request_releases_its_blocks_to_the_running_batch(store: EmbeddedStore) -> None:
    settings = SimSettings(chunk_blocks=1, num_blocks=16, decode_ms=1.0)
    prefill = store_node("p0", store, SimSettings(chunk_blocks=1))
    decode = store_node("d0", store, settings)
    both = (prefill, decode)
    with closing(prefill), closing(decode):
        parked = make_request("parked", PROMPT[:130], max_tokens=4)
        hand_off(*both, parked, send_first=False)
        spin(
            both, lambda: decode.loop.counters["fetched_chunks"] == 8, "the parked request's chunks"
        )
        running = make_request("running", b"x" + PROMPT[:40], max_tokens=150)
        decode.take(RunJob(running))
        spin(both, lambda: len(decode.ids("running")) == 150, "the running request's end")
        decode.take(FirstTokens(parked.id, 1, (tuple(prefill.ids("parked")),)))
        spin(both, lambda: len(decode.ids("parked")) == 3, "the parked request's end")
        assert decode.loop.counters["fetched_chunks"] == 16
        assert decode.loop.counters["reused_chunks"] == 8
        settle(both)
        reference = LoopNode("reference")
        for request in (parked, running):
            ids = prefill.ids(request.id) + decode.ids(request.id)
            assert [ids] == run_alone(reference, request)
        reference.close()


def test_after_a_reset_nothing_is_cached_and_routers_know(node: LoopNode) -> None:
    node.take(RunJob(make_request("r", PROMPT)))
    spin([node], lambda: len(node.ids("r")) == 8, "the first answer")
    settle([node])
    assert node.engine.cached_chunks()
    node.take(ResetPrefixCache(), RunJob(make_request("again", PROMPT)))
    spin([node], lambda: node.ids("again") == node.ids("r"), "the same answer")
    assert node.engine.load().cached_prompt_tokens_total == 0
    node.take(ResetPrefixCache())

    def known() -> set[BlockHash]:
        """The chunks that a router knows of."""
        chunks: set[BlockHash] = set()
        for frame in node.port.sent:
            if isinstance(frame, CacheEvents):
                chunks = (chunks | {*frame.stored}) - {*frame.evicted}
        return chunks

    spin([node], lambda: bool(known()), "a listing of chunks")
    spin([node], lambda: not known(), "the news that they are gone")


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abc"), ("priority", "bca")])
def test_a_node_runs_requests_in_the_order_of_its_policy(policy: Any, order: str) -> None:
    options = SchedulingOptions(scheduling_policy=policy)
    node = LoopNode("n0", SimSettings(max_num_seqs=1, scheduling=options))
    with closing(node):
        for name, priority in (("a", 5), ("b", -1), ("c", 0)):
            request = make_request(name, PROMPT)
            node.take(RunJob(msgspec.structs.replace(request, priority=priority)))
        ended: list[str] = []

        def all_ended() -> bool:
            ended.extend(each for each in "abc" if len(node.ids(each)) == 8 and each not in ended)
            return len(ended) == 3

        spin([node], all_ended, "the answers")
        assert "".join(ended) == order
        settle([node])
