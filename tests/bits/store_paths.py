"""The paths on which KV travels between nodes: each a row of STORE_PATHS.

In: a Bench with a real Redis store. Out: nothing, or Differs. The nodes' step loops run in this
process; test_pools has whole nodes behind a router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from baton_engine.interface import TokenOut
from baton_protocol.link import RunJob
from baton_protocol.request import Request
from tests.bits.cells import GREEDY, SUBJECTS, Answer, Bench, ids_in, others, token_of
from tests.bits.paths import POSITIONS, SCHEDULING, subjects
from tests.support.nodes.step_loops import LoopNode, hand_off, settle, spin, store_node

PLENTY = 1 << 30  # bytes per second that a node may write behind


@contextmanager
def nodes(bench: Bench, *names: str, **settings: Any) -> Iterator[list[LoopNode]]:
    made: list[LoopNode] = []
    assert bench.store is not None
    try:
        for name in names:
            engine = bench.engine(kv_blocks=1500, max_batched_tokens=64, **settings)
            made.append(store_node(name, bench.store, engine=engine, write_behind=PLENTY))
        yield made
    finally:
        for node in made:
            node.close()


def answer(node: LoopNode, request: str, choice: int) -> Answer:
    tokens = [token for token in node.tokens(request) if isinstance(token, TokenOut)]
    return tuple(token_of(token.id, token.logprobs) for token in tokens if token.choice == choice)


def finish(all_nodes: Sequence[LoopNode], node: LoopNode, requests: Sequence[Request]) -> None:
    """Turn the loops until the node has ended all choices of the requests, and all are idle."""

    def ended() -> bool:
        return all(
            sum(token.finish is not None for token in node.tokens(each.id)) == each.params.n
            for each in requests
        )

    spin(all_nodes, ended, "the requests' end")
    settle(all_nodes)


def handed_off(bench: Bench, **settings: Any) -> None:
    """A prefill node computes the prompt, a decode node the rest, beside others on both."""
    with nodes(bench, "prefill", "decode", **settings) as pair:
        prefill, decode = pair
        for node, seed in ((prefill, 1), (decode, 2)):
            node.take(*(RunJob(each) for each in others(4, seed=seed)))
        for request in subjects():
            hand_off(prefill, decode, request)
        finish(pair, decode, subjects())
        assert decode.loop.counters["reused_chunks"] >= len(SUBJECTS)
        for subject in SUBJECTS:
            for choice in range(subject.params.n):
                first = answer(prefill, subject.name, choice)
                rest = answer(decode, subject.name, choice)
                bench.check("handed off", subject, (*first[:1], *rest), choice)


def handed_off_with_scheduling_options(bench: Bench) -> None:
    """Without a prefix cache, KV moves all the same; and some requests go before others."""
    for settings in SCHEDULING if bench.thorough else SCHEDULING[:1]:
        handed_off(bench, **settings)


def fetched(bench: Bench) -> None:
    """A node fetches the chunks of prompts that another node computed."""
    with nodes(bench, "first", "second") as both:
        for node, label in zip(both, ("stored", "fetched"), strict=True):
            node.take(*(RunJob(each) for each in (*others(3), *subjects())))
            finish(both, node, subjects())
            for subject in SUBJECTS:
                for choice in range(subject.params.n):
                    bench.check(label, subject, answer(node, subject.name, choice), choice)
        assert all(both[1].prompted(each.name).stats.fetched_tokens > 0 for each in SUBJECTS)


def lost(bench: Bench) -> None:
    """A node is lost after each of 40 tokens; another continues from what it had stored."""
    with nodes(bench, "lost", "next") as (first, second):
        first.take(RunJob(GREEDY.request()))
        finish([first], first, [GREEDY.request()])
        assert first.loop.counters["behind_chunks"] > 0
        known = ids_in(bench.expected(GREEDY))
        requests = [
            GREEDY.request(f"after {position}", known=[known[:position]])
            for position in bench.some(POSITIONS)
        ]
        second.take(*(RunJob(each) for each in requests))
        finish([second], second, requests)
        assert second.loop.counters["fetched_chunks"] > 0
        for request in requests:
            begin = len(request.outputs[0])
            label = f"continued after {begin} tokens"
            bench.check(label, GREEDY, answer(second, request.id, 0), begin=begin)


STORE_PATHS: Mapping[str, Callable[[Bench], None]] = {
    "handed off": handed_off,
    "handed off with scheduling options": handed_off_with_scheduling_options,
    "fetched": fetched,
    "node lost": lost,
}
