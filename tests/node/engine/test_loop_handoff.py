"""Two step loops in one process, a real store between them: the hand-off, and what can go wrong."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_protocol.link import Abort, FirstTokens, NoFirstTokens, PrefillJob, RunJob
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import (
    LoopNode,
    NodeMaker,
    finish_hand_off,
    hand_off,
    run_alone,
    settle,
    spin,
    store_node,
    undisturbed,
)
from tests.support.stores.kvstore import plain_client

pytestmark = pytest.mark.integration

PROMPT = bytes((i * 7) % 95 + 32 for i in range(205))  # 12 blocks of 16 and a tail
CHUNK2 = SimSettings(chunk_blocks=2, max_batched_tokens=48)


@pytest.fixture
def pair(make_node: NodeMaker) -> tuple[LoopNode, LoopNode]:
    """Two nodes that prefill in pieces of 48 tokens, with chunks of 2 blocks."""
    return make_node("p0", CHUNK2), make_node("d0", CHUNK2)


def test_a_request_that_is_handed_off_has_the_ids_of_a_single_node(
    pair: tuple[LoopNode, LoopNode],
) -> None:
    request = make_request("r", PROMPT, max_tokens=24)
    hand_off(*pair, request)
    assert finish_hand_off(pair, request) == undisturbed(request, CHUNK2)
    prefill, decode = pair[0].loop.counters, pair[1].loop.counters
    assert prefill["published_chunks"] == decode["fetched_chunks"] == decode["reused_chunks"] == 6
    assert decode["fetched_bytes"] == prefill["published_bytes"] == 6 * CHUNK2.layout().chunk_bytes
    assert decode["handoffs"] == 1
    stats = pair[1].prompted("r").stats
    assert (stats.fetched_tokens, stats.computed_tokens) == (192, 13)


@pytest.mark.parametrize("first", [True, False], ids=["FirstTokens", "NoFirstTokens"])
def test_the_wait_for_the_prefill_node_is_no_queue_time(
    pair: tuple[LoopNode, LoopNode], first: bool
) -> None:
    request = make_request("r", PROMPT, max_tokens=4)
    prefill, decode = pair
    hand_off(*pair, request, send_first=False)
    spin(pair, lambda: decode.loop.counters["fetched_chunks"] == 6, "the prompt's chunks")
    decode.clock_ahead_s += 1000
    outputs = (tuple(prefill.ids("r")),)
    decode.take(FirstTokens("r", 1, outputs) if first else NoFirstTokens("r", 1, "it is gone"))  # type: ignore[arg-type]
    finish_hand_off(pair, request)
    stats = decode.prompted("r").stats
    assert stats.handoff_ms >= 1e6
    assert stats.queue_ms + stats.fetch_ms + stats.prefill_ms < 1e6


def test_choices_of_a_seeded_request_differ_and_survive_the_hand_off(
    pair: tuple[LoopNode, LoopNode],
) -> None:
    request = make_request("r", PROMPT, n=3, temperature=1.0, seed=7, max_tokens=12)
    hand_off(*pair, request)
    ids = finish_hand_off(pair, request)
    assert ids == undisturbed(request, CHUNK2)
    assert len({tuple(choice) for choice in ids}) == 3


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64])
def test_prompts_around_block_and_chunk_boundaries_are_handed_off(
    pair: tuple[LoopNode, LoopNode], length: int
) -> None:
    request = make_request("r", PROMPT[:length], max_tokens=20)
    hand_off(*pair, request)
    assert finish_hand_off(pair, request) == undisturbed(request, CHUNK2)
    assert pair[1].loop.counters["reused_chunks"] == length // 32


def test_a_second_request_with_the_prefix_computes_only_its_tail_on_any_node(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    first = make_request("r1", PROMPT)
    hand_off(*pair, first)
    finish_hand_off(pair, first)
    with closing(store_node("d1", store, CHUNK2)) as third:
        request = make_request("r2", PROMPT + b"and more of it")
        assert run_alone(third, request) == undisturbed(request, CHUNK2)
        assert third.prompted("r2").stats.fetched_tokens == 192
        settle([third])
    again = make_request("r3", PROMPT)
    hand_off(*pair, again)
    assert finish_hand_off(pair, again) == undisturbed(again, CHUNK2)
    assert pair[0].loop.counters["published_chunks"] == 6
    assert pair[0].loop.counters["announced_chunks"] == 6
    assert pair[0].prompted("r3").stats.cached_tokens == 192


def test_a_prefill_job_fetches_the_stored_prefix_before_it_computes(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    first = make_request("r1", PROMPT)
    hand_off(*pair, first)
    finish_hand_off(pair, first)
    with closing(store_node("p1", store, CHUNK2)) as other:
        request = make_request("r2", PROMPT + PROMPT)
        hand_off(other, pair[1], request)
        spin((other, pair[1]), lambda: len(pair[1].ids("r2")) == 7, "the request's end")
        settle((other, pair[1]))
        assert other.prompted("r2").stats.fetched_tokens == 192
        assert other.ids("r2") + pair[1].ids("r2") == undisturbed(request, CHUNK2)[0]


def test_announcements_that_arrive_before_the_job_are_not_lost(
    pair: tuple[LoopNode, LoopNode],
) -> None:
    prefill, decode = pair
    request = make_request("r", PROMPT)
    prefill.take(PrefillJob(request, decode.name, decode.epoch))
    spin(pair, lambda: bool(prefill.tokens("r")) and prefill.loop.idle, "the prefill job")
    spin(pair, lambda: decode.loop.early_entries >= 7, "six chunks and the end as early entries")
    decode.take(RunJob(request, await_first=True))
    decode.take(FirstTokens(request.id, 1, (tuple(prefill.ids("r")),)))
    assert finish_hand_off(pair, request) == undisturbed(request, CHUNK2)
    assert decode.loop.counters["reused_chunks"] == 6


def test_without_a_first_token_the_decode_node_samples_it_itself(
    pair: tuple[LoopNode, LoopNode],
) -> None:
    request = make_request("r", PROMPT[:192])  # chunks cover the prompt: one token is left
    hand_off(*pair, request, send_first=False)
    pair[1].take(NoFirstTokens(request.id, 1, "the prefill node went away"))
    spin(pair, lambda: len(pair[1].ids("r")) == 8, "the request's end")
    settle(pair)
    assert [pair[1].ids("r")] == undisturbed(request, CHUNK2)
    assert pair[1].prompted("r").stats.computed_tokens >= 1


def test_a_prefill_node_that_never_publishes_does_not_change_the_tokens(
    store: EmbeddedStore,
) -> None:
    with closing(store_node("d0", store, CHUNK2, first_wait_s=0.05)) as decode:
        request = make_request("r", PROMPT)
        decode.take(RunJob(request, await_first=True), NoFirstTokens(request.id, 1, "lost"))
        spin([decode], lambda: len(decode.ids("r")) == 8, "the request's end")
        settle([decode])
        assert [decode.ids("r")] == undisturbed(request, CHUNK2)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_chunk_does_not_change_the_tokens(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore, damage: str
) -> None:
    first = make_request("r1", PROMPT)
    hand_off(*pair, first)
    finish_hand_off(pair, first)
    _damage_one_chunk(store, damage)
    with closing(store_node("d1", store, CHUNK2)) as other:
        request = make_request("r2", PROMPT)
        assert run_alone(other, request) == undisturbed(request, CHUNK2)
        assert other.loop.counters["lost_chunks"] == 1
        settle([other])
        assert other.loop.counters["reused_chunks"] < 6


def _damage_one_chunk(store: EmbeddedStore, damage: str) -> None:
    for url in store.data_urls:
        with plain_client(url) as client:
            for key in sorted(client.scan_iter("kv1:*")):
                if damage == "flip":
                    client.setrange(key, 5000, b"\x55\xaa\x55\xaa")
                elif damage == "cut":
                    client.set(key, bytes(client.get(key))[:-1], keepttl=True)
                else:
                    client.delete(key)
                return


def test_a_prefill_job_publishes_a_damaged_chunk_again(
    pair: tuple[LoopNode, LoopNode], store: EmbeddedStore
) -> None:
    first = make_request("r1", PROMPT)
    hand_off(*pair, first)
    finish_hand_off(pair, first)
    _damage_one_chunk(store, "flip")
    other, decode = store_node("p1", store, CHUNK2), store_node("d1", store, CHUNK2)
    both = (other, decode)
    with closing(other), closing(decode):
        request = make_request("r2", PROMPT)
        hand_off(*both, request)
        spin(both, lambda: len(decode.ids("r2")) == 7, "the request's end")
        settle(both)
        assert other.ids("r2") + decode.ids("r2") == undisturbed(request, CHUNK2)[0]
        assert other.loop.counters["published_chunks"] == 1


def test_an_abort_during_a_fetch_leaks_no_block(pair: tuple[LoopNode, LoopNode]) -> None:
    prefill, decode = pair
    request = make_request("r", PROMPT)
    prefill.take(PrefillJob(request, decode.name, decode.epoch))
    decode.take(RunJob(request, await_first=True))
    spin(pair, lambda: decode.engine.load().free_blocks < 2048, "blocks for the fetch")
    decode.take(Abort(request.id, 1))
    settle(pair)
    assert not decode.tokens("r")


def test_aborts_at_any_moment_leak_no_block(pair: tuple[LoopNode, LoopNode]) -> None:
    prefill, decode = pair
    for turns in range(0, 40, 3):
        request = make_request(f"r{turns}", bytes([33 + turns]) + PROMPT, max_tokens=30)
        prefill.take(PrefillJob(request, decode.name, decode.epoch))
        decode.take(RunJob(request, await_first=True))
        for _ in range(turns):
            prefill.loop.turn()
            decode.loop.turn()
        prefill.take(Abort(request.id, 1))
        decode.take(Abort(request.id, 1))
    settle(pair)


def test_a_newer_attempt_replaces_the_older_one(pair: tuple[LoopNode, LoopNode]) -> None:
    prefill, decode = pair
    old = make_request("r", PROMPT)
    prefill.take(PrefillJob(old, decode.name, decode.epoch))
    decode.take(RunJob(old, await_first=True))
    spin(pair, lambda: decode.engine.load().free_blocks < 2048, "blocks for the fetch")
    new = make_request("r", PROMPT, attempt=2)
    decode.take(RunJob(new), RunJob(old, await_first=True))
    spin(pair, lambda: len(decode.ids("r")) == 8, "the request's end")
    settle(pair)
    assert {token.attempt for token in decode.tokens("r")} == {2}
    assert [decode.ids("r")] == undisturbed(new, CHUNK2)


def test_many_requests_at_once_finish_in_a_pool_that_is_too_small_for_all(
    store: EmbeddedStore,
) -> None:
    small = SimSettings(chunk_blocks=1, num_blocks=24, max_batched_tokens=64)
    prefill = store_node("p0", store, small)
    decode = store_node("d0", store, small, blocks_wait_s=BLOCKS_WAIT_S)
    both = (prefill, decode)
    with closing(prefill), closing(decode):
        requests = [
            make_request(f"r{i}", bytes([40 + i]) + PROMPT[: 60 + 9 * i], max_tokens=40)
            for i in range(8)
        ]
        for request in requests:
            decode.take(RunJob(request, await_first=True))
            prefill.take(PrefillJob(request, decode.name, decode.epoch))
        sent: set[str] = set()

        def finished() -> bool:
            for request in requests:
                if request.id not in sent and prefill.tokens(request.id):
                    sent.add(request.id)
                    decode.take(FirstTokens(request.id, 1, (tuple(prefill.ids(request.id)),)))
            return all(len(decode.ids(request.id)) == 39 for request in requests)

        spin(both, finished, "all requests")
        settle(both)
        for request in requests:
            ids = prefill.ids(request.id) + decode.ids(request.id)
            assert [ids] == undisturbed(request, CHUNK2)


BLOCKS_WAIT_S = 30.0


def test_a_store_that_is_down_is_logged_once_and_not_per_chunk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = EmbeddedStore(64 << 20)
    store.start()
    node = store_node("p0", store, CHUNK2)
    try:
        store.stop()
        for number in range(3):
            prompt = bytes([40 + number]) + PROMPT
            node.take(PrefillJob(make_request(f"r{number}", prompt), node.name, node.epoch))
        spin([node], lambda: all(node.tokens(f"r{i}") for i in range(3)), "the first tokens")
        settle([node])
    finally:
        node.close()
        store.stop()
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len([each for each in warnings if each.name == "baton_node.engine.outgoing_blocks"]) == 1
