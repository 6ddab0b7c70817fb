"""A step loop whose store is unhealthy: its reports, its waits, and the blocks that it holds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import msgspec
import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.engine.outgoing_blocks import STILL_S
from baton_node.store.null_connector import NoStore
from baton_protocol.ids import BlockHash, RequestId
from baton_protocol.link import Abort, Load, NoFirstTokens, PrefillJob, RunJob
from baton_protocol.store import StoreHealth
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
from tests.support.stores.kvstore import frozen

PROMPT = bytes((i * 7) % 95 + 32 for i in range(330))
HOUR_S = 3600.0


class SwitchableStore(NoStore):
    """An empty store whose health the test sets."""

    def __init__(self, *, healthy: bool) -> None:
        super().__init__()
        self.is_healthy = healthy
        self.lookups: list[RequestId] = []

    def healthy(self) -> bool:
        return self.is_healthy

    def store_health(self) -> StoreHealth:
        return "up" if self.is_healthy else "down"

    def lookup(self, request: RequestId, attempt: int, hashes: Sequence[BlockHash]) -> None:
        self.lookups.append(request)
        super().lookup(request, attempt, hashes)


def switchable(*, healthy: bool, **options: Any) -> tuple[LoopNode, SwitchableStore]:
    connector = SwitchableStore(healthy=healthy)
    return LoopNode("n0", connect=lambda _: connector, **options), connector


def first_token(node: LoopNode, request: RequestId) -> None:
    spin([node], lambda: bool(node.tokens(request)), "the first token")


def wait_until_stalled(node: LoopNode) -> None:
    deadline = time.monotonic() + STILL_S
    spin([node], lambda: time.monotonic() > deadline, "puts to count as stalled")


def reported_health(node: LoopNode) -> list[StoreHealth]:
    return [frame.store for frame in node.port.sent if isinstance(frame, Load)]


# --- reports --------------------------------------------------------------------------------------


def test_a_change_of_the_stores_health_is_reported_at_once() -> None:
    node, connector = switchable(healthy=True, load_every_s=HOUR_S)
    node.loop.turn()
    connector.is_healthy = False
    node.loop.turn()
    node.loop.turn()
    connector.is_healthy = True
    node.loop.turn()
    assert reported_health(node) == ["up", "down", "up"]
    node.close()


def test_a_node_without_a_store_reports_none() -> None:
    node = LoopNode("n0")
    node.loop.turn()
    assert reported_health(node) == ["none"]
    node.close()


@pytest.mark.integration
def test_a_frozen_store_and_its_recovery_are_reported(
    store: EmbeddedStore,
) -> None:
    with closing(store_node("n0", store, patient=False)) as node:
        spin([node], lambda: reported_health(node)[-1:] == ["up"], "a healthy store")
        with frozen(store.pid("index")):
            spin([node], lambda: reported_health(node)[-1] == "down", "an unhealthy store")
        spin([node], lambda: reported_health(node)[-1] == "up", "a healthy store again")


# --- waits ----------------------------------------------------------------------------------------


def test_a_request_does_not_wait_for_chunks_of_an_unhealthy_store() -> None:
    node, _ = switchable(healthy=False, first_wait_s=HOUR_S)
    request = make_request("r", PROMPT)
    node.take(RunJob(request, await_first=True), NoFirstTokens(request.id, 1, "lost"))
    spin([node], lambda: len(node.ids("r")) == 8, "the request's end")
    settle([node])
    node.close()


def test_a_request_for_prompt_logprobs_uses_neither_the_store_nor_the_cache() -> None:
    node, connector = switchable(healthy=True)
    plain = run_alone(node, make_request("plain", PROMPT[::-1]))
    for name, prompt in (("cold", PROMPT), ("warm", PROMPT[::-1])):
        ids = run_alone(node, make_request(name, prompt, prompt_logprobs=2))
        assert (ids == plain) == (name == "warm")
        prompted = node.prompted(name)
        assert prompted.stats.computed_tokens == len(prompt)
        assert [each.sampled.id for each in prompted.logprobs] == list(prompt[1:])
        assert all(len(each.top) == 2 for each in prompted.logprobs)
    assert connector.lookups == ["plain"]
    settle([node])
    node.close()


def test_prompt_logprobs_that_exceed_one_frame_are_refused() -> None:
    node, _ = switchable(healthy=True)
    request = make_request("r", bytes(20_000), prompt_logprobs=20)
    node.take(RunJob(request))
    spin([node], lambda: bool(node.failures()), "the refusal")
    error = node.failures()[0].error
    assert (error.status, error.param, error.retryable) == (400, "prompt_logprobs", False)
    node.close()


# --- held blocks ----------------------------------------------------------------------------------


@pytest.mark.integration
def test_blocks_of_an_aborted_fetch_are_held_until_it_has_settled(store: EmbeddedStore) -> None:
    prefill, decode = store_node("p0", store), store_node("d0", store)
    both = (prefill, decode)
    with closing(prefill), closing(decode):
        hand_off(prefill, decode, make_request("first", PROMPT))
        spin(both, lambda: len(decode.ids("first")) == 7, "the chunks in the store")
        settle(both)
        with closing(store_node("d1", store)) as other:
            request = make_request("r", PROMPT)
            with frozen(store.pid("data0"), store.pid("data1")):
                other.take(RunJob(request))
                spin([other], lambda: not other.freed, "blocks for the fetch")
                other.take(Abort(request.id, 1))
                other.loop.turn()
                assert not other.freed
                # The same attempt again: it cannot be distinguished from the fetches in flight.
                other.take(RunJob(request))
                other.loop.turn()
                assert [failed.error.retryable for failed in other.failures()] == [True]
            settle([other])
            assert not other.tokens("r")


@pytest.mark.integration
def test_blocks_of_a_fetch_past_its_deadline_are_held_until_it_has_settled(
    store: EmbeddedStore,
) -> None:
    prefill, decode = store_node("p0", store), store_node("d0", store)
    both = (prefill, decode)
    with closing(prefill), closing(decode):
        request = make_request("r", PROMPT)
        request = msgspec.structs.replace(request, time_left=10.0)
        prefill.take(PrefillJob(request, decode.name, decode.epoch))
        spin(both, lambda: prefill.loop.idle and decode.loop.early_entries > 20, "the chunks")
        with frozen(store.pid("data0"), store.pid("data1")):
            decode.take(RunJob(request, await_first=True))
            spin([decode], lambda: not decode.freed, "blocks for the fetch")
            decode.clock_ahead_s += 10
            spin([decode], lambda: bool(decode.failures()), "the end")
            assert not decode.freed
        settle(both)
        assert decode.failures()[0].error.code == "deadline_exceeded"


@pytest.mark.integration
def test_an_abort_during_a_lookup_forgets_the_request_at_once(
    store: EmbeddedStore,
) -> None:
    with closing(store_node("n0", store, lookup_wait_s=HOUR_S)) as node:
        request = make_request("r", PROMPT)
        with frozen(store.pid("index")):
            node.take(RunJob(request))
            node.loop.turn()
            node.take(Abort(request.id, 1))
            node.loop.turn()
            assert node.loop.idle
        settle([node])
        assert not node.tokens("r")


@pytest.mark.integration
def test_an_abort_during_the_wait_for_blocks_forgets_the_request_at_once(
    store: EmbeddedStore,
) -> None:
    prefill = store_node("p0", store)
    small = SimSettings(chunk_blocks=1, num_blocks=24)
    decode = store_node("d0", store, small, blocks_wait_s=HOUR_S)
    both = (prefill, decode)
    with closing(prefill), closing(decode):
        running = make_request("running", PROMPT[::-1], max_tokens=40)
        decode.take(RunJob(running))
        request = make_request("r", PROMPT)
        hand_off(prefill, decode, request, send_first=False)
        spin(
            both,
            lambda: decode.engine.load().free_blocks < 21,
            "a pool without blocks for another request",
        )
        decode.take(Abort(request.id, 1))
        decode.loop.turn()
        spin(both, lambda: len(decode.ids("running")) == 40, "the running request's end")
        settle(both)
        assert not decode.tokens("r")


@pytest.mark.integration
def test_puts_to_a_stalled_store_hold_at_most_half_of_the_pool(
    store: EmbeddedStore,
) -> None:
    settings = SimSettings(chunk_blocks=1, num_blocks=24)
    with closing(store_node("p0", store, settings)) as node:
        with frozen(store.pid("data0"), store.pid("data1")):
            for job, prompt in enumerate((PROMPT[:150], PROMPT[1:150], PROMPT[2:150])):
                request = make_request(f"r{job}", prompt)
                node.take(PrefillJob(request, *NOBODY))
                first_token(node, request.id)
                wait_until_stalled(node)
                # Not at once: a late transfer that settles gives the next ones the same time.
                spin([node], lambda: node.engine.load().free_blocks >= 12, "half the pool")
            assert len(run_alone(node, make_request("other", PROMPT[:150]))[0]) == 8
        settle([node])


@pytest.mark.integration
def test_a_prefill_job_ends_even_if_it_can_publish_nothing(store: EmbeddedStore) -> None:
    node = store_node("p0", store, patient=False)
    with closing(node), frozen(store.pid("index"), store.pid("data0"), store.pid("data1")):
        node.take(PrefillJob(make_request("r", PROMPT), *NOBODY))
        spin([node], lambda: bool(node.tokens("r")), "the first token")
        settle([node])
        assert node.loop.counters["published_chunks"] == 0
