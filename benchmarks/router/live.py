"""The CPU time of the live page's snapshots, with one viewer and with none.

    python -m benchmarks.router.live [--quick]

Claim: with 4 nodes, 200 requests in flight and 1,000 that end per second, one viewer costs under
1 % of a core: the snapshot of each second, its JSON, and noting the ends. The cost of noting the
ends while nobody looks is printed beside it.

The requests are the router's own records, each placed on a pair of nodes, with 4 considered
options and 64 tokens of an answer. One feed makes a snapshot per second of a simulated clock, as
fast as it can. Times are the process's own CPU time, so a busy machine matters less.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass

import msgspec

from baton_protocol.ids import Epoch, NodeId
from baton_protocol.store import LATENCY_BOUNDS_S, NodeLoad, Role, RouterReport, Speeds
from baton_router.auth import Tenant
from baton_router.live.feed import LiveFeed, Sources
from baton_router.live.records import Snapshot
from baton_router.live.snapshot import MOST_ENDED
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.chat import CHAT
from baton_router.placement.placement import Considered, Placement
from baton_router.requests.attempt import PlacementBasis
from baton_router.requests.context import RequestContext
from benchmarks.support.figures import at_most, exit_code, machine, spread
from benchmarks.support.router.placement_pool import in_flight, kind, layout, report

RUNNING, ENDED = 200, 1000
PROMPT, ANSWER = 512, 64
LIMIT = 1.0  # % of a core
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")


@dataclass(frozen=True)
class Costs:
    """Milliseconds of CPU: of one snapshot, and of noting the ends of one second with a viewer and
    without."""

    snapshot: float
    ends: float
    ends_unseen: float


class Pool:
    """A pool in the middle of its work, at a simulated time."""

    def __init__(self) -> None:
        self.now = 100.0
        shape = layout(8)
        self.view = PoolView(lambda: self.now, 1000)
        roles: list[tuple[Role, tuple[str, str]]] = [("prefill", PREFILL), ("decode", DECODE)]
        for role, names in roles:
            for name in names:
                load = NodeLoad(running=50, free_blocks=900, cached_blocks=500, total_blocks=1000)
                self.view.hello(report(name, role, shape, Speeds(), load))
        self._kind = kind(shape)
        self.running = [self.call(number) for number in range(RUNNING)]
        self.ended = [self.call(number) for number in range(ENDED)]
        self.feed = LiveFeed(
            Sources(
                pool="default",
                router="router",
                view=self.view,
                models=lambda: ["m"],
                report=self.report,
                running=lambda: self.running,
            ),
            lambda: self.now,
            every_s=0.0,
        )

    def call(self, number: int) -> RequestContext:
        request = in_flight(f"{number:032x}", tuple(range(PROMPT)), (), self._kind)
        prefill, decode = NodeId(PREFILL[number % 2]), NodeId(DECODE[number % 2])
        considered = tuple(
            Considered(
                decode=NodeId(decode_name),
                prefill=NodeId(prefill_name),
                predicted_ms=50.0,
                queue_ms=10.0,
                compute_ms=30.0,
                fetch_ms=5.0,
                slowdown_ms=5.0,
                cached_tokens=0,
                uncached=PROMPT,
            )
            for prefill_name in PREFILL
            for decode_name in DECODE
        )
        placement = Placement(
            decode=decode,
            prefill=prefill,
            reason="split",
            explanation="the hand-off costs little",
            predicted_ms=50.0,
            uncached=PROMPT,
            considered=considered,
        )
        basis = PlacementBasis(store_up=True, chunks=4, stored_chunks=0, exact="bitwise")
        request.record.start_attempt(placement, Epoch("e"), basis)
        request.record.outputs[0].extend(range(ANSWER))
        assert request.record.current is not None
        if number % 10:  # the others hand off
            request.record.current.decoding_at = 0.05
        context = RequestContext(request.id, 90.0, CHAT, tenant=Tenant("acme"))
        context.in_flight, context.ttft_s = (request,), 0.05
        return context

    def report(self) -> RouterReport:
        """The counters after one second more."""
        self.now += 1.0
        counts = tuple(int(100 * self.now) for _ in range(len(LATENCY_BOUNDS_S) + 1))
        return RouterReport(
            router="router",
            uptime_s=self.now,
            requests_total=int(1000 * self.now),
            output_tokens_total=int(64_000 * self.now),
            ttft_counts=counts,
            itl_counts=counts,
        )

    def note_ends(self) -> float:
        """Let a second's calls end; the milliseconds that noting it took."""
        began = time.process_time()
        for context in self.ended:
            self.feed.note_end(context, 200, self.now)
        return 1e3 * (time.process_time() - began)


async def measure(pool: Pool, snapshots: int) -> Costs:
    ends_unseen = pool.note_ends()
    viewer = pool.feed.join(Tenant(admin=True), lambda: None)
    try:
        await viewer.next()
        ends, began = 0.0, time.process_time()
        for _ in range(snapshots):
            ends += pool.note_ends()
            data = await viewer.next()
        took = 1e3 * (time.process_time() - began)
    finally:
        pool.feed.leave(viewer)
    assert data is not None
    snapshot = msgspec.json.decode(data, type=Snapshot)
    assert (len(snapshot.requests), len(snapshot.ended)) == (RUNNING, MOST_ENDED)
    return Costs((took - ends) / snapshots, ends / snapshots, ends_unseen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer passes")
    quick = parser.parse_args().quick
    passes, snapshots = (3, 50) if quick else (9, 200)
    print(machine())
    pool = Pool()
    found = [asyncio.run(measure(pool, snapshots)) for _ in range(passes)]
    print(f"ms of CPU, {passes} passes of {snapshots} seconds: median [range]")
    print(f"one snapshot                        {spread([one.snapshot for one in found])}")
    print(f"noting {ENDED} ends, one viewer       {spread([one.ends for one in found])}")
    print(f"noting {ENDED} ends, nobody looks     {spread([one.ends_unseen for one in found])}")
    shares = [(one.snapshot + one.ends) / 10 for one in found]
    verdict = at_most(shares, LIMIT, "% of a core")
    print(f"% of a core with one viewer         {spread(shares)}   {verdict.text}")
    return exit_code([verdict], quick=quick)


if __name__ == "__main__":
    sys.exit(main())
