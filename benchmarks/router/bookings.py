"""The delay until a router knows what another router has booked on a node, and that it has ended.

Two routers have a link each to one node process with the simulated engine. A request goes through
the first router. Measured are the time from its booking there until the second router's view of the
node counts it, and from its release until that view no longer does. Meanwhile another request keeps
the engine in steps of --step-ms: it reads no message between two of them, so the node's server must
report. The end of a request is the end of a step, so it waits for no other step.

    python -m benchmarks.router.bookings [--requests 200] [--step-ms 300] [--limit-ms 50] [--quick]

Prints median, p99 and maximum of both; exit 1 if a p99 exceeds the limit. The routers share this
process, which polls every half millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import aiohttp

from baton_engine.config.engine_config import SimConfig
from baton_node.settings import NodeSettings
from baton_protocol.ids import NodeId
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from benchmarks.support.figures import percentile
from benchmarks.support.role_processes import answer_of, decode_node
from benchmarks.support.servers import HOST, free_port

LOOK_S = 0.0005
WAIT_S = 60.0
NODE = NodeId("decode-0")
LONG, SHORT = 1_000_000, 2


async def when(true: Callable[[], bool]) -> float:
    """The time at which it was true first, as far as looks can tell."""
    async with asyncio.timeout(WAIT_S):
        while not true():
            await asyncio.sleep(LOOK_S)
    return time.perf_counter()


def sequences(router: Router) -> int:
    return router.view.nodes[NODE].sequences


async def ask(session: aiohttp.ClientSession, router: Router, tokens: int) -> None:
    body = {"prompt": f"{random.random()} is a number", "max_tokens": tokens, "ignore_eos": True}
    url = f"http://{HOST}:{router.port}/v1/completions"
    async with session.post(url, json=body) as response:
        await response.read()


async def measure(
    session: aiohttp.ClientSession, first: Router, second: Router, requests: int
) -> tuple[list[float], list[float]]:
    """Milliseconds until the second router knew of bookings, and of their ends."""
    begun, over = [], []
    calm = sequences(second)
    for _ in range(requests):
        await asyncio.sleep(random.uniform(0.0, 0.1))
        asking = asyncio.create_task(ask(session, first, SHORT))
        booked = await when(lambda: sequences(first) > calm)
        begun.append(1e3 * (await when(lambda: sequences(second) > calm) - booked))
        released = await when(lambda: not first.dispatcher.in_flight)
        over.append(1e3 * (await when(lambda: sequences(second) == calm) - released))
        await asking
        await when(lambda: sequences(first) == calm)
    return begun, over


def run(requests: int, step_ms: float) -> tuple[list[float], list[float]]:
    """Beside one node, on the simulated engine."""
    port = free_port()
    node = NodeSettings(
        node=NODE,
        role="decode",
        port=port,
        engine="sim",
        kv_blocks=100_000,
        max_model_len=2 * LONG,
        sim=SimConfig(decode_ms=step_ms),
    )
    url = f"http://{HOST}:{port}"
    with decode_node(node):
        answer_of(f"{url}/ready")
        return asyncio.run(beside(url, requests))


async def beside(url: str, requests: int) -> tuple[list[float], list[float]]:
    """Two routers of the node at `url`; a third asks for what keeps its engine busy."""
    settings = RouterSettings(port=0, nodes=(url,), request_timeout_s=3600.0)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        routers = [await stack.enter_async_context(Router(settings)) for _ in range(3)]
        for router in routers:
            await when(lambda view=router.view: bool(list(view.ready())))  # type: ignore[misc]
        busy = asyncio.create_task(ask(session, routers[2], LONG))
        await when(lambda: sequences(routers[0]) == sequences(routers[1]) == 1)
        try:
            return await measure(session, routers[0], routers[1], requests)
        finally:
            busy.cancel()
            await asyncio.gather(busy, return_exceptions=True)


def line(name: str, found: Sequence[float]) -> str:
    return (
        f"{name:<8} n={len(found):<4} p50 {statistics.median(found):6.1f} ms"
        f"   p99 {percentile(found, 0.99):6.1f}   longest {max(found):6.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--step-ms", type=float, default=300.0, help="milliseconds of a step of the busy engine"
    )
    parser.add_argument("--limit-ms", type=float, default=50.0)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    options = parser.parse_args()
    requests = options.requests // 4 if options.quick else options.requests
    begun, over = run(requests, options.step_ms)
    print(line("booked", begun))
    print(line("released", over))
    tails = (percentile(found, 0.99) for found in (begun, over))
    return 0 if max(tails) <= options.limit_ms else 1


if __name__ == "__main__":
    sys.exit(main())
