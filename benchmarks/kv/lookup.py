"""Lookup of a 512-chunk prefix on an idle index: Index.lookup beside redis-py's MGET.

    python -m benchmarks.kv.lookup [--quick]

Claim: one round trip, under 1 ms at the median. Both look up the same names over one connection, in
turn: Baton's in the event loop, with markers as the result; redis-py's as it is, with bytes as the
result. None, half or all of the prefix is stored. The server counts the round trips.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import sys
import time
from collections.abc import Awaitable, Callable

import redis.asyncio

from baton_kvstore.embedded.servers import EmbeddedStore
from baton_kvstore.index.markers import Index
from baton_kvstore.keys import marker_key
from baton_protocol.ids import BlockHash, Fingerprint
from baton_protocol.store import Marker
from benchmarks.support.figures import Verdict, at_most, exit_code, machine, percentile, spread

CHUNKS = 512
LIMIT_MS = 1.0
FINGERPRINT = Fingerprint("b" * 32)
LIFETIME_MS = 3_600_000

Look = Callable[[], Awaitable[int]]


def names() -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(b"%d" % n).digest()[:16]) for n in range(CHUNKS)]


def marker(depth: int) -> Marker:
    return Marker(instance=depth % 2, run_id="a" * 40, payload_bytes=1 << 20, shards=1, depth=depth)


async def times_ms(look: Look, expected: int, count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        hits = await look()
        found.append((time.perf_counter() - began) * 1e3)
        if hits != expected:
            raise SystemExit(f"{hits} markers, expected {expected}")
    return found


async def commands_of(client: redis.asyncio.Redis, look: Look, count: int) -> float:
    """Commands per lookup, as the server counts them."""

    async def processed() -> int:
        return int((await client.info("stats"))["total_commands_processed"])

    before = await processed()
    for _ in range(count):
        await look()
    return (await processed() - before - 1) / count  # the first INFO is counted too


async def compare(
    index: Index, client: redis.asyncio.Redis, present: int, options: argparse.Namespace
) -> list[Verdict]:
    chunks = names()
    keys = [marker_key(FINGERPRINT, chunk) for chunk in chunks]
    await client.flushall()
    marks = [(chunk, marker(depth), LIFETIME_MS) for depth, chunk in enumerate(chunks[:present])]
    await index.mark_all(FINGERPRINT, marks)

    async def ours() -> int:
        return sum(found is not None for found in await index.lookup(FINGERPRINT, chunks))

    async def theirs() -> int:
        return sum(found is not None for found in await client.mget(keys))

    sides = {"baton": ours, "redis-py": theirs}
    middles: dict[str, list[float]] = {name: [] for name in sides}
    tails: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(options.passes + 1):
        for name, look in sides.items():
            found = await times_ms(look, present, options.lookups)
            if turn:  # the first one warms up
                middles[name].append(percentile(found, 0.5))
                tails[name].append(percentile(found, 0.99))
    verdict = at_most(middles["baton"], LIMIT_MS, "ms")
    trips = await commands_of(client, ours, 10)
    print(f"{present} of {CHUNKS} chunks stored: {trips:g} command per lookup")
    for name in sides:
        goal = verdict.text if name == "baton" else ""
        print(
            f"  {name:9} median {spread(middles[name]):>18}   p99 {spread(tails[name]):>18} ms"
            f"   {goal}"
        )
    return [verdict, Verdict(trips == 1.0, "")]


async def run(options: argparse.Namespace) -> list[Verdict]:
    verdicts = []
    with EmbeddedStore() as store:
        client = redis.asyncio.Redis.from_url(store.index_url, protocol=2)
        async with Index(store.index_url, "bench") as index:
            for present in (0, CHUNKS // 2, CHUNKS):
                verdicts += await compare(index, client, present, options)
        await client.aclose()
    return verdicts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--lookups", type=int, default=200, help="lookups per pass and side")
    parser.add_argument("--quick", action="store_true", help="3 passes of 50 lookups")
    options = parser.parse_args()
    if options.quick:
        options.passes, options.lookups = 3, 50
    print(f"embedded index on a unix socket; {machine()}; {options.passes} passes in turns")
    return exit_code(asyncio.run(run(options)), quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
