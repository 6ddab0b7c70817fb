"""What the router adds to the time to the first token, compared with the node's link alone.

Closed loop: each client has one request at a time, without a pause. Prompts of one kind go in
alternating rounds directly over the nodes' links (RunJob) and through the router's HTTP API. Both
are timed from sending to the first token. The nodes are real processes with the simulated engine,
20 ms of prefill and 5 ms per token; the store is a real Redis, so the router's lookups count.

There are as many nodes as clients: directly, each client has its own node, and the router spreads
requests over them. With fewer nodes, requests wait for each other's 20 ms steps, and it matters
more whether two of them share a step than what the router does.

    python -m benchmarks.router.ttft [--clients 8] [--requests 800] [--limit-ms 3] [--quick]

Prints medians and tails of both and the difference of the medians; exit 1 if it exceeds the limit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import string
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field

from baton_engine.config.engine_config import SimConfig
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.settings import NodeSettings
from baton_router import RouterSettings
from benchmarks.support.figures import percentile
from benchmarks.support.role_processes import answer_of, decode_node, model_of, router
from benchmarks.support.router.load_generator import (
    Question,
    Send,
    closed_loop,
    direct_link,
    http_clients,
)
from benchmarks.support.servers import HOST, free_port

PROMPT_CHARS = 256
ANSWER_TOKENS = (4, 32)
ROUNDS = 5


@dataclass
class Samples:
    """Milliseconds to the first token."""

    direct: list[float] = field(default_factory=list)
    router: list[float] = field(default_factory=list)


def question(rng: random.Random) -> Question:
    """Its ids are those of the byte tokenizer, which a node without a model has."""
    text = "".join(rng.choices(string.ascii_letters, k=PROMPT_CHARS))
    return Question(text, tuple(text.encode()), rng.randint(*ANSWER_TOKENS))


async def firsts(senders: Sequence[Send], rng: random.Random, count: int) -> list[float]:
    """Milliseconds to the first token of `count` questions."""
    timings = await closed_loop(senders, [question(rng) for _ in range(count)])
    return [timing.first_ms for timing in timings]


async def measure(urls: Sequence[str], router_port: int, options: argparse.Namespace) -> Samples:
    rng = random.Random(0)
    samples = Samples()
    model = model_of(router_port)
    async with AsyncExitStack() as stack:
        direct = [await stack.enter_async_context(direct_link(url)) for url in urls]
        routed = await stack.enter_async_context(http_clients(router_port, model, len(urls)))
        for senders in (direct, routed):
            await firsts(senders, rng, options.clients * 4)
        for _ in range(ROUNDS):
            samples.direct += await firsts(direct, rng, options.requests // ROUNDS)
            samples.router += await firsts(routed, rng, options.requests // ROUNDS)
    return samples


def node(name: str, store: EmbeddedStore, port: int) -> NodeSettings:
    return NodeSettings(
        node=name,
        role="decode",
        port=port,
        engine="sim",
        kv_blocks=4_000,
        chunk_blocks=1,
        index_url=store.index_url,
        data_urls=store.data_urls,
        sim=SimConfig(prefill_base_ms=20.0, decode_ms=5.0),
    )


def run(options: argparse.Namespace) -> Samples:
    """Redis, the nodes and a router as processes, and the clients in this one."""
    with ExitStack() as stack:
        store = stack.enter_context(EmbeddedStore())
        urls = []
        for index in range(options.clients):
            port = free_port()
            stack.enter_context(decode_node(node(f"decode-{index}", store, port)))
            urls.append(f"http://{HOST}:{port}")
        for url in urls:
            answer_of(url + "/ready")
        port = free_port()
        settings = RouterSettings(port=port, nodes=tuple(urls), index_url=store.index_url)
        stack.enter_context(router(settings))
        answer_of(f"http://{HOST}:{port}/ready")
        return asyncio.run(measure(urls, port, options))


def line(name: str, found: Sequence[float]) -> str:
    return (
        f"{name:<8} n={len(found):<5} median {statistics.median(found):7.2f} ms"
        f"   mean {statistics.fmean(found):7.2f}"
        f"   p90 {percentile(found, 0.90):7.2f}   p99 {percentile(found, 0.99):7.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--requests", type=int, default=800, help="requests per side, in all rounds"
    )
    parser.add_argument("--limit-ms", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    options = parser.parse_args()
    if options.quick:
        options.requests //= 4
    samples = run(options)
    added = statistics.median(samples.router) - statistics.median(samples.direct)
    print(line("direct", samples.direct))
    print(line("router", samples.router))
    print(f"the router adds {added:.2f} ms at the median (limit {options.limit_ms:g} ms)")
    return 0 if added <= options.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
