"""What a node computes for whole requests reaches the store, where there is room and bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
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
ANSWER = 60
SETTINGS = SimSettings(chunk_blocks=2, max_batched_tokens=48)
CHUNK = 32  # tokens
OF_PROMPT = len(PROMPT) // CHUNK
FULL = (len(PROMPT) + ANSWER - 1) // CHUNK  # the KV of the last token is never computed
PLENTY = 1 << 30
HELD_S = 1.0  # less than a node waits for a server that stands still

Make = Callable[..., LoopNode]


@pytest.fixture
def make(store: EmbeddedStore) -> Iterator[Make]:
    """Nodes on the module's store, by name."""
    made: list[LoopNode] = []

    def node(name: str, on: EmbeddedStore = store, **options: Any) -> LoopNode:
        made.append(store_node(name, on, SETTINGS, **{"write_behind": PLENTY, **options}))
        return made[-1]

    yield node
    for each in made:
        each.close()


def asked(name: str, prompt: bytes = PROMPT, **params: Any) -> Request:
    return make_request(name, prompt, **{"max_tokens": ANSWER, **params})


def going_on(request: Request, answer: list[int], name: str = "next") -> Request:
    """A new prompt: the old one and its answer, as in the next turn of a conversation."""
    ids = (*request.prompt_ids, *answer)
    return msgspec.structs.replace(asked(name), prompt_ids=ids)


def data_keys(store: EmbeddedStore) -> int:
    keys = 0
    for url in store.data_urls:
        with plain_client(url) as client:
            keys += sum(b":s" in key for key in client.scan_iter())
    return keys


# --- what is found --------------------------------------------------------------------------------


def test_a_second_node_finds_what_the_first_one_generated(make: Make) -> None:
    first, second = make("a"), make("b")
    request = asked("r")
    (answer,) = run_alone(first, request)
    settle([first])
    assert first.loop.counters.behind_chunks == FULL
    assert first.loop.counters.behind_bytes == FULL * SETTINGS.layout().chunk_bytes
    assert first.loop.counters.behind_skipped == 0
    follow_up = going_on(request, answer)
    assert run_alone(second, follow_up) == undisturbed(follow_up, SETTINGS)
    assert second.prompted("next").stats.fetched_tokens == FULL * CHUNK > len(PROMPT)
    settle([first, second])


def test_each_choice_s_answer_is_found(make: Make) -> None:
    first, second = make("a"), make("b")
    request = asked("r", n=2, temperature=1.0, seed=3)
    answers = run_alone(first, request)
    settle([first])
    assert answers[0] != answers[1]
    for choice, answer in enumerate(answers):
        follow_up = going_on(request, answer, name=f"choice {choice}")
        assert run_alone(second, follow_up) == undisturbed(follow_up, SETTINGS)
        cached = second.prompted(follow_up.id).stats.cached_tokens
        fetched = second.prompted(follow_up.id).stats.fetched_tokens
        assert cached + fetched >= FULL * CHUNK


def test_what_was_fetched_or_cached_is_not_written_again(make: Make) -> None:
    first, second = make("a"), make("b")
    request = asked("r")
    (answer,) = run_alone(first, request)
    settle([first])
    run_alone(first, asked("again"))  # the prompt is cached, the answer is computed anew
    settle([first])
    assert first.loop.counters.behind_chunks == FULL + FULL - OF_PROMPT
    follow_up = going_on(request, answer)
    run_alone(second, follow_up)
    settle([second])
    new = (len(follow_up.prompt_ids) + ANSWER - 1) // CHUNK - FULL
    assert second.loop.counters.behind_chunks == new


def test_what_the_store_is_known_to_hold_is_computed_and_not_written_again(make: Make) -> None:
    first, second = make("a"), make("b", fetch="never")
    run_alone(first, asked("r"))
    settle([first])
    run_alone(second, asked("again"))
    settle([second])
    assert second.loop.counters.fetched_chunks == 0
    assert second.loop.counters.behind_chunks == FULL - OF_PROMPT


class PutRecorder(StoreConnector):
    """Keeps the priority of each put."""

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


def test_a_decode_node_writes_behind_its_answer_and_not_what_was_handed_to_it(make: Make) -> None:
    prefill, decode = make("p", kind=PutRecorder), make("d", kind=PutRecorder)
    request = asked("r")
    hand_off(prefill, decode, request)
    spin((prefill, decode), lambda: len(decode.ids("r")) == ANSWER - 1, "the request's end")
    settle((prefill, decode))
    assert prefill.loop.counters.published_chunks == OF_PROMPT
    assert prefill.loop.counters.behind_chunks == 0
    assert decode.loop.counters.behind_chunks == FULL - OF_PROMPT
    for node, priority in ((prefill, Priority.HANDOFF), (decode, Priority.BEHIND)):
        assert isinstance(node.connector, PutRecorder)
        assert set(node.connector.priorities) == {priority}


def test_a_chunk_that_was_lost_is_written_behind_once_computed(
    make: Make, store: EmbeddedStore
) -> None:
    first, second = make("a"), make("b")
    run_alone(first, asked("r"))
    settle([first])
    for url in store.data_urls:
        with plain_client(url) as client:
            client.flushall()
    assert run_alone(second, asked("again")) == undisturbed(asked("again"), SETTINGS)
    settle([second])
    assert second.loop.counters.lost_chunks == OF_PROMPT
    assert second.loop.counters.behind_chunks == data_keys(store) == FULL


# --- with stop strings ----------------------------------------------------------------------------

LAST_FILLED = FULL * CHUNK - len(PROMPT) + 1  # with so many tokens the last full chunk is filled


def stoppable(name: str) -> Request:
    """The server looks for the string, so that here nothing stops it."""
    return asked(name, stop=("found by the server",))


def test_what_the_server_may_still_cut_off_is_not_written(make: Make, store: EmbeddedStore) -> None:
    node = make("a")
    node.take(RunJob(stoppable("r")))
    spin([node], lambda: len(node.ids("r")) >= LAST_FILLED + 1, "a chunk of surplus tokens")
    assert len(node.engine.full_chunks(RequestId("r"))) == FULL
    node.take(FinishChoice(RequestId("r"), 1, 0))
    settle([node])
    assert node.loop.counters.behind_chunks == data_keys(store) == FULL - 1
    assert node.loop.counters.behind_skipped == 0


def test_what_the_server_has_let_pass_is_written_and_found(make: Make) -> None:
    first, second = make("a"), make("b")
    request = stoppable("r")
    (answer,) = run_alone(first, request)
    assert len(answer) >= LAST_FILLED + STOP_LAG - 1
    settle([first])
    assert first.loop.counters.behind_chunks == FULL
    follow_up = going_on(request, answer)
    assert run_alone(second, follow_up) == undisturbed(follow_up, SETTINGS)
    assert second.prompted("next").stats.fetched_tokens == FULL * CHUNK


def test_what_a_resumed_request_came_with_is_certain(make: Make) -> None:
    node = make("a")
    (answer,) = undisturbed(asked("r"), SETTINGS)
    resumed = msgspec.structs.replace(stoppable("r"), outputs=(tuple(answer[:LAST_FILLED]),))
    node.take(RunJob(resumed))
    spin([node], lambda: len(node.ids("r")) >= 2, "two tokens")
    node.take(FinishChoice(RequestId("r"), 1, 0))
    settle([node])
    assert node.loop.counters.behind_chunks == FULL


def test_a_drain_too_leaves_out_what_may_still_be_cut_off(make: Make) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(stoppable("r")))
    spin([node], lambda: len(node.ids("r")) >= LAST_FILLED + 1, "a chunk of surplus tokens")
    node.take(Drain(), FinishChoice(RequestId("r"), 1, 0))
    spin([node], lambda: drained(node), "the end")
    assert node.loop.counters.behind_chunks == FULL - 1
    settle([node])


# --- what is left out -----------------------------------------------------------------------------


def test_without_bandwidth_for_it_nothing_is_written(make: Make, store: EmbeddedStore) -> None:
    node = make("a", write_behind=0)
    run_alone(node, asked("r"))
    settle([node])
    assert node.loop.counters.behind_chunks == 0
    assert node.loop.counters.behind_skipped == FULL
    assert data_keys(store) == 0


def test_into_a_store_over_half_full_nothing_is_written(make: Make) -> None:
    with EmbeddedStore(16 << 20) as small:
        node = make("a", on=small)
        with plain_client(small.data_urls[0]) as client:
            for number in range(10):
                client.set(f"somebody's {number}", bytes(1 << 20), px=60_000)
        wait_until(lambda: not node.connector.take_behind(1), "the plane to see it")
        run_alone(node, asked("r"))
        settle([node])
        assert node.loop.counters.behind_chunks == 0
        assert node.loop.counters.behind_skipped == FULL


def test_a_store_that_stands_still_is_given_no_more_than_an_eighth_of_the_pool(
    make: Make, store: EmbeddedStore
) -> None:
    settings = replace(SETTINGS, num_blocks=48)
    with closing(store_node("small", store, settings, write_behind=PLENTY)) as node:
        with frozen(store.pid("data0"), store.pid("data1")):
            run_alone(node, asked("r"))
            spin([node], lambda: not node.engine.has_work(), "the request's blocks")
            load = node.engine.load()
            assert load.free_blocks < load.total_blocks
            assert load.total_blocks - load.free_blocks <= 48 // 8
        settle([node])


# --- a node that ends -----------------------------------------------------------------------------


def drained(node: LoopNode) -> bool:
    return any(isinstance(frame, Drained) for frame in node.port.sent)


def saved(node: LoopNode) -> bool:
    return any(isinstance(frame, Saved) for frame in node.port.sent)


def test_a_node_that_drains_publishes_what_its_requests_have_and_what_they_fill(
    make: Make,
) -> None:
    leaving, staying = make("a", write_behind=0), make("b")
    request = asked("r")
    leaving.take(RunJob(request))
    spin([leaving], lambda: len(leaving.ids("r")) >= 20, "some tokens")
    assert leaving.loop.counters.behind_chunks == 0
    leaving.take(Drain())
    leaving.loop.turn()
    has = leaving.ids("r")
    spin([leaving], lambda: leaving.loop.counters.behind_chunks >= 7, "the chunks it has")
    moved = msgspec.structs.replace(request, attempt=2, outputs=(tuple(has),))
    staying.take(RunJob(moved))
    spin([staying], lambda: len(has) + len(staying.ids("r")) == ANSWER, "the rest")
    assert [has + staying.ids("r")] == undisturbed(request, SETTINGS)
    spin([leaving], lambda: drained(leaving), "the end")
    assert leaving.loop.counters.behind_chunks == FULL
    settle([leaving, staying])


def test_saved_is_said_when_what_a_request_had_is_in_the_store(
    make: Make, store: EmbeddedStore
) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(asked("r")))
    spin([node], lambda: len(node.ids("r")) >= 20, "some tokens")
    with frozen(store.pid("data0"), store.pid("data1")):
        began = time.monotonic()
        node.take(Drain())
        spin([node], lambda: time.monotonic() > began + 0.3, "a while")
        assert not saved(node) or time.monotonic() > began + HELD_S
    spin([node], lambda: saved(node), "the word")
    assert node.loop.counters.behind_chunks > OF_PROMPT
    settle([node])


def test_a_node_that_drains_no_more_is_as_sparing_as_before(make: Make) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(asked("r")))
    spin([node], lambda: len(node.ids("r")) >= 20, "some tokens")
    node.take(Drain(), Undrain())
    spin([node], lambda: len(node.ids("r")) == ANSWER, "the request's end")
    settle([node])
    assert node.loop.counters.behind_chunks == FULL - 1  # all but what was filled later
    assert not saved(node)
    assert not drained(node)
    node.take(Drain())
    spin([node], lambda: saved(node) and drained(node), "both words")


def test_a_node_is_not_drained_before_its_puts_have_settled(
    make: Make, store: EmbeddedStore
) -> None:
    node = make("a", write_behind=0)
    node.take(RunJob(asked("r")))
    spin([node], lambda: len(node.ids("r")) >= 20, "some tokens")
    with frozen(store.pid("data0"), store.pid("data1")):
        began = time.monotonic()
        node.take(Drain())
        spin([node], lambda: len(node.ids("r")) == ANSWER, "the request's end")
        spin([node], lambda: time.monotonic() > began + 0.3, "a while")
        assert not drained(node) or time.monotonic() > began + HELD_S
    spin([node], lambda: drained(node), "the end")
    settle([node])
    assert node.loop.counters.behind_chunks > 0
