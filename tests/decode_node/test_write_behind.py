"""Write-behind: a node stores the chunks of whole requests, within limits of room and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.engine.job import STOP_LAG
from baton_node.ipc.messages import Drain, Drained, FinishChoice, Saved, Undrain
from baton_node.store.base import ChunkRef
from baton_node.store.redis_connector import StoreConnector
from baton_protocol.ids import BlockId, RequestId
from baton_protocol.link import RunJob
from baton_protocol.request import Request
from baton_protocol.store import Priority
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import (
    LoopNode,
    NodeMaker,
    hand_off,
    run_alone,
    settle,
    spin,
    store_node,
    undisturbed,
)
from tests.support.stores.kvstore import frozen, plain_client, wait_until

pytestmark = pytest.mark.integration

PROMPT = bytes((i * 7) % 95 + 32 for i in range(205))
OUTPUT = 60  # tokens
SETTINGS = SimSettings(chunk_blocks=2, max_batched_tokens=48)
CHUNK = 32  # tokens
PROMPT_CHUNKS = len(PROMPT) // CHUNK
ALL_CHUNKS = (len(PROMPT) + OUTPUT - 1) // CHUNK  # the KV of the last token is never computed
PLENTY = 1 << 30  # bytes per second
HELD_S = 1.0  # less than a node waits for a frozen server

Make = partial[LoopNode]


@pytest.fixture
def make(make_node: NodeMaker) -> Make:
    """Make nodes with ample bandwidth for write-behind."""
    return partial(make_node, settings=SETTINGS, write_behind=PLENTY)


def request_of(name: str, prompt: bytes = PROMPT, **params: Any) -> Request:
    return make_request(name, prompt, **{"max_tokens": OUTPUT, **params})


def follow_up_of(request: Request, output: list[int], name: str = "next") -> Request:
    """A request whose prompt is another request's prompt and output, as the next turn of a chat."""
    ids = (*request.prompt_ids, *output)
    return msgspec.structs.replace(request_of(name), prompt_ids=ids)


def data_keys(store: EmbeddedStore) -> int:
    keys = 0
    for url in store.data_urls:
        with plain_client(url) as client:
            keys += sum(b":s" in key for key in client.scan_iter())
    return keys


# --- stored chunks --------------------------------------------------------------------------------


def test_a_second_node_fetches_the_chunks_that_the_first_one_generated(make: Make) -> None:
    first, second = make("a"), make("b")
    request = request_of("r")
    (output,) = run_alone(first, request)
    settle([first])
    assert first.loop.counters["behind_chunks"] == ALL_CHUNKS
    assert first.loop.counters["behind_bytes"] == ALL_CHUNKS * SETTINGS.layout().chunk_bytes
    assert first.loop.counters["behind_skipped"] == 0
    follow_up = follow_up_of(request, output)
    assert run_alone(second, follow_up) == undisturbed(follow_up, SETTINGS)
    assert second.prompted("next").stats.fetched_tokens == ALL_CHUNKS * CHUNK > len(PROMPT)
    settle([first, second])


def test_the_output_of_each_choice_is_stored(make: Make) -> None:
    first, second = make("a"), make("b")
    request = request_of("r", n=2, temperature=1.0, seed=3)
    outputs = run_alone(first, request)
    settle([first])
    assert outputs[0] != outputs[1]
    for choice, output in enumerate(outputs):
        follow_up = follow_up_of(request, output, name=f"choice {choice}")
        assert run_alone(second, follow_up) == undisturbed(follow_up, SETTINGS)
        cached = second.prompted(follow_up.id).stats.cached_tokens
        fetched = second.prompted(follow_up.id).stats.fetched_tokens
        assert cached + fetched >= ALL_CHUNKS * CHUNK


def test_fetched_and_cached_chunks_are_not_written_again(make: Make) -> None:
    first, second = make("a"), make("b")
    request = request_of("r")
    (output,) = run_alone(first, request)
    settle([first])
    run_alone(first, request_of("again"))  # the prompt is cached, the output is computed again
    settle([first])
    assert first.loop.counters["behind_chunks"] == ALL_CHUNKS + ALL_CHUNKS - PROMPT_CHUNKS
    follow_up = follow_up_of(request, output)
    run_alone(second, follow_up)
    settle([second])
    new = (len(follow_up.prompt_ids) + OUTPUT - 1) // CHUNK - ALL_CHUNKS
    assert second.loop.counters["behind_chunks"] == new


def test_chunks_that_a_lookup_found_are_not_written_again_if_they_are_computed(make: Make) -> None:
    first, second = make("a"), make("b", fetch="never")
    run_alone(first, request_of("r"))
    settle([first])
    run_alone(second, request_of("again"))
    settle([second])
    assert second.loop.counters["fetched_chunks"] == 0
    assert second.loop.counters["behind_chunks"] == ALL_CHUNKS - PROMPT_CHUNKS


class PutRecorder(StoreConnector):
    """A connector that records the priority of each put."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.priorities: list[Priority] = []

    def publish(
        self,
        chunk: ChunkRef,
        blocks: Sequence[BlockId],
        priority: Priority,
        inbox: tuple[str, str] | None = None,
    ) -> None:
        self.priorities.append(priority)
        super().publish(chunk, blocks, priority, inbox)


def test_a_decode_node_writes_behind_its_output_but_not_the_handed_off_prompt(make: Make) -> None:
    prefill, decode = make("p", kind=PutRecorder), make("d", kind=PutRecorder)
    request = request_of("r")
    hand_off(prefill, decode, request)
    spin((prefill, decode), lambda: len(decode.ids("r")) == OUTPUT - 1, "the request's end")
    settle((prefill, decode))
    assert prefill.loop.counters["published_chunks"] == PROMPT_CHUNKS
    assert prefill.loop.counters["behind_chunks"] == 0
    assert decode.loop.counters["behind_chunks"] == ALL_CHUNKS - PROMPT_CHUNKS
    for node, priority in ((prefill, Priority.HANDOFF), (decode, Priority.BEHIND)):
        assert isinstance(node.connector, PutRecorder)
        assert set(node.connector.priorities) == {priority}


def test_a_lost_chunk_is_written_behind_once_it_is_computed(
    make: Make, store: EmbeddedStore
) -> None:
    first, second = make("a"), make("b")
    run_alone(first, request_of("r"))
    settle([first])
    for url in store.data_urls:
        with plain_client(url) as client:
            client.flushall()
    assert run_alone(second, request_of("again")) == undisturbed(request_of("again"), SETTINGS)
    settle([second])
    assert second.loop.counters["lost_chunks"] == PROMPT_CHUNKS
    assert second.loop.counters["behind_chunks"] == data_keys(store) == ALL_CHUNKS


# --- with stop strings ----------------------------------------------------------------------------

LAST_FILLED = (
    ALL_CHUNKS * CHUNK - len(PROMPT) + 1
)  # number of output tokens that fill the last full chunk


def stoppable(name: str) -> Request:
    """A request with a stop string. Only the server process searches for it: nothing stops it
    here."""
    return request_of(name, stop=("found by the server",))


def test_a_chunk_that_a_stop_string_may_still_cut_off_is_not_written(
    make: Make, store: EmbeddedStore
) -> None:
    node = make("a")
    node.take(RunJob(stoppable("r")))
    spin([node], lambda: len(node.ids("r")) >= LAST_FILLED + 1, "a chunk of surplus tokens")
    assert len(node.engine.full_chunks(RequestId("r"))) == ALL_CHUNKS
    node.take(FinishChoice(RequestId("r"), 1, 0))
    settle([node])
    assert node.loop.counters["behind_chunks"] == data_keys(store) == ALL_CHUNKS - 1
    assert node.loop.counters["behind_skipped"] == 0


def test_a_chunk_that_no_stop_string_can_cut_off_any_more_is_written(make: Make) -> None:
    first, second = make("a"), make("b")
    request = stoppable("r")
    (output,) = run_alone(first, request)
    assert len(output) >= LAST_FILLED + STOP_LAG - 1
    settle([first])
    assert first.loop.counters["behind_chunks"] == ALL_CHUNKS
    follow_up = follow_up_of(request, output)
    assert run_alone(second, follow_up) == undisturbed(follow_up, SETTINGS)
    assert second.prompted("next").stats.fetched_tokens == ALL_CHUNKS * CHUNK


def test_the_known_output_of_a_resumed_request_is_written_at_once(make: Make) -> None:
    node = make("a")
    (output,) = undisturbed(request_of("r"), SETTINGS)
    resumed = msgspec.structs.replace(stoppable("r"), outputs=(tuple(output[:LAST_FILLED]),))
    node.take(RunJob(resumed))
    spin([node], lambda: len(node.ids("r")) >= 2, "two tokens")
    node.take(FinishChoice(RequestId("r"), 1, 0))
    settle([node])
    assert node.loop.counters["behind_chunks"] == ALL_CHUNKS


def test_a_drain_does_not_write_a_chunk_that_may_still_be_cut_off(make: Make) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(stoppable("r")))
    spin([node], lambda: len(node.ids("r")) >= LAST_FILLED + 1, "a chunk of surplus tokens")
    node.take(Drain(), FinishChoice(RequestId("r"), 1, 0))
    spin([node], lambda: drained(node), "Drained")
    assert node.loop.counters["behind_chunks"] == ALL_CHUNKS - 1
    settle([node])


# --- limits ---------------------------------------------------------------------------------------


def test_without_bandwidth_for_write_behind_nothing_is_written(
    make: Make, store: EmbeddedStore
) -> None:
    node = make("a", write_behind=0)
    run_alone(node, request_of("r"))
    settle([node])
    assert node.loop.counters["behind_chunks"] == 0
    assert node.loop.counters["behind_skipped"] == ALL_CHUNKS
    assert data_keys(store) == 0


def test_nothing_is_written_to_a_store_that_is_more_than_half_full(make: Make) -> None:
    with EmbeddedStore(16 << 20) as small:
        node = make("a", on=small)
        with plain_client(small.data_urls[0]) as client:
            for number in range(10):
                client.set(f"other {number}", bytes(1 << 20), px=60_000)
        wait_until(lambda: not node.connector.take_behind(1), "the data plane to notice it")
        run_alone(node, request_of("r"))
        settle([node])
        assert node.loop.counters["behind_chunks"] == 0
        assert node.loop.counters["behind_skipped"] == ALL_CHUNKS


def test_write_behind_to_a_frozen_store_holds_at_most_an_eighth_of_the_pool(
    make: Make, store: EmbeddedStore
) -> None:
    settings = replace(SETTINGS, num_blocks=48)
    with closing(store_node("small", store, settings, write_behind=PLENTY)) as node:
        with frozen(store.pid("data0"), store.pid("data1")):
            run_alone(node, request_of("r"))
            spin([node], lambda: not node.engine.has_work(), "the request's blocks")
            load = node.engine.load()
            assert load.free_blocks < load.total_blocks
            assert load.total_blocks - load.free_blocks <= 48 // 8
        settle([node])


# --- drain ----------------------------------------------------------------------------------------


def drained(node: LoopNode) -> bool:
    return any(isinstance(frame, Drained) for frame in node.port.sent)


def saved(node: LoopNode) -> bool:
    return any(isinstance(frame, Saved) for frame in node.port.sent)


def test_a_draining_node_publishes_the_full_chunks_of_its_requests_and_later_ones(
    make: Make,
) -> None:
    leaving, staying = make("a", write_behind=0), make("b")
    request = request_of("r")
    leaving.take(RunJob(request))
    spin([leaving], lambda: len(leaving.ids("r")) >= 20, "some tokens")
    assert leaving.loop.counters["behind_chunks"] == 0
    leaving.take(Drain())
    leaving.loop.turn()
    generated = leaving.ids("r")
    spin([leaving], lambda: leaving.loop.counters["behind_chunks"] >= 7, "the chunks that are full")
    moved = msgspec.structs.replace(request, attempt=2, outputs=(tuple(generated),))
    staying.take(RunJob(moved))
    spin([staying], lambda: len(generated) + len(staying.ids("r")) == OUTPUT, "the request's end")
    assert [generated + staying.ids("r")] == undisturbed(request, SETTINGS)
    spin([leaving], lambda: drained(leaving), "Drained")
    assert leaving.loop.counters["behind_chunks"] == ALL_CHUNKS
    settle([leaving, staying])


def test_saved_is_sent_once_the_chunks_of_running_requests_are_stored(
    make: Make, store: EmbeddedStore
) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(request_of("r")))
    spin([node], lambda: len(node.ids("r")) >= 20, "some tokens")
    with frozen(store.pid("data0"), store.pid("data1")):
        began = time.monotonic()
        node.take(Drain())
        spin([node], lambda: time.monotonic() > began + 0.3, "0.3 s")
        assert not saved(node) or time.monotonic() > began + HELD_S
    spin([node], lambda: saved(node), "Saved")
    assert node.loop.counters["behind_chunks"] > PROMPT_CHUNKS
    settle([node])


def test_a_node_that_resumes_has_its_write_behind_limits_again(make: Make) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(request_of("r")))
    spin([node], lambda: len(node.ids("r")) >= 20, "some tokens")
    node.take(Drain(), Undrain())
    spin([node], lambda: len(node.ids("r")) == OUTPUT, "the request's end")
    settle([node])
    assert (
        node.loop.counters["behind_chunks"] == ALL_CHUNKS - 1
    )  # all but the chunk filled after the Undrain
    assert not saved(node)
    assert not drained(node)
    node.take(Drain())
    spin([node], lambda: saved(node) and drained(node), "Saved and Drained")


def test_a_node_is_not_drained_before_its_puts_have_settled(
    make: Make, store: EmbeddedStore
) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(request_of("r")))
    spin([node], lambda: len(node.ids("r")) >= 20, "some tokens")
    with frozen(store.pid("data0"), store.pid("data1")):
        began = time.monotonic()
        node.take(Drain())
        spin([node], lambda: len(node.ids("r")) == OUTPUT, "the request's end")
        spin([node], lambda: time.monotonic() > began + 0.3, "0.3 s")
        assert not drained(node) or time.monotonic() > began + HELD_S
    spin([node], lambda: drained(node), "Drained")
    settle([node])
    assert node.loop.counters["behind_chunks"] > 0
