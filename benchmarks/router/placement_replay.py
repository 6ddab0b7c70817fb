"""Placement policies on one trace: time to first token and goodput, in simulated time.

    python -m benchmarks.router.placement_replay [--quick]

Claim: placement by predicted cost beats random, round-robin, least-request and prefix on mean and
p99 TTFT and on goodput, the share of requests with their first token within --ttft and a mean
inter-token latency within --itl.

Router: PoolView, Places and place() as they are, on a simulated clock. Nodes: the timing model of
benchmarks.support.router.replay_nodes. Trace: seeded, in the style of Mooncake's. Sessions start at
random. Each has one of a few system prompts, of which few are popular, and some turns. A turn's
prompt is all earlier text and new text; one turn in six is a long document. The same turns arrive
at the same times with every policy.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass
from hashlib import blake2b

from baton_protocol.ids import BlockHash, NodeId
from baton_protocol.policies import RANKINGS, Ranking
from baton_protocol.store import NodeLoad, Role
from baton_router.nodes.pool_view import PoolView
from baton_router.placement.placement import Placement
from baton_router.placement.policy import PlacementPolicy
from baton_router.requests.attempt import PlacementBasis
from baton_router.requests.placer import Placer
from benchmarks.support.figures import Verdict, exit_code, percentile
from benchmarks.support.router.placement_pool import in_flight, kind, no_store, report
from benchmarks.support.router.replay_nodes import (
    EVENTS_S,
    LOAD_S,
    SHAPE,
    STORE_CHUNKS,
    Chunks,
    Job,
    Node,
    Timeline,
)

SYSTEMS = 12
TURNS = 5  # of a session, on average
THINK_S = 12.0
PERIOD = SHAPE.chunk_tokens
BASIS = PlacementBasis(store_up=True, chunks=0, stored_chunks=0, exact="numeric")


@dataclass(frozen=True, slots=True)
class Turn:
    """`words` name what its prompt is made of: (source, tokens of it), then its answer."""

    arrives: float
    prompt: int
    answer: int
    chunks: tuple[BlockHash, ...]
    after: tuple[BlockHash, ...]


def trace(seed: int, seconds: float, sessions_per_s: float) -> list[Turn]:
    rng = random.Random(seed)
    systems = [(f"s{n}", rng.randrange(512, 4096)) for n in range(SYSTEMS)]
    weights = [1 / (n + 1) for n in range(SYSTEMS)]
    turns, at, session = [], 0.0, 0
    while (at := at + rng.expovariate(sessions_per_s)) < seconds:
        session += 1
        [(system, length)] = rng.choices(systems, weights)
        when, shared = at, length // PERIOD
        own = f"{seed}-{session}"
        while True:
            long = rng.random() < 1 / 6
            length += int(rng.lognormvariate(8.3, 0.6) if long else rng.lognormvariate(5.5, 0.8))
            answer = 1 + min(800, int(rng.lognormvariate(4.8, 0.7)))
            names = _names(system, shared, own, (length + answer) // PERIOD)
            turns.append(Turn(when, length, answer, names[: length // PERIOD], names))
            length += answer
            when += rng.expovariate(1 / THINK_S)
            if rng.random() < 1 / TURNS or when > seconds:
                break
    return sorted(turns, key=lambda turn: turn.arrives)


def _names(system: str, shared: int, own: str, count: int) -> tuple[BlockHash, ...]:
    """A session's chunks: its system prompt's, then its own."""
    words = (f"{system}/{n}" if n < shared else f"{own}/{n}" for n in range(count))
    return tuple(BlockHash(blake2b(word.encode(), digest_size=16).digest()) for word in words)


class Replay:
    """One router and its pool."""

    def __init__(self, ranking: Ranking, options: argparse.Namespace) -> None:
        self._time = Timeline()
        self._view = PoolView(lambda: self._time.now, 1_000_000)
        self._store = Chunks(STORE_CHUNKS)
        self._places = Placer(
            self._view, no_store(), PlacementPolicy(ranking=ranking), random.Random(1)
        )
        self._nodes: dict[NodeId, Node] = {}
        self._began: dict[str, float] = {}
        self.jobs: list[Job] = []
        self._ended = 0
        for role, count in (("prefill", options.prefills), ("decode", options.decodes)):
            for number in range(count):
                self._meet(f"{role}-{number}", "prefill" if role == "prefill" else "decode")

    def run(self, turns: list[Turn]) -> list[Job]:
        for number, turn in enumerate(turns):
            self._time.at(turn.arrives, lambda n=number, t=turn: self._arrive(n, t))  # type: ignore[misc]
        self._time.run(lambda: self._ended == len(turns))
        return self.jobs

    def _meet(self, name: str, role: Role) -> None:
        node = Node(name, role, self._time, self._store, self._first, self._end)
        self._nodes[NodeId(name)] = node
        hello = report(name, role, SHAPE, node.speeds(), NodeLoad())
        self._view.hello(hello).usable = True
        # Nodes did not start at the same moment.
        self._tell_load(node, LOAD_S * len(self._nodes) / 100)
        self._tell_events(node, EVENTS_S * len(self._nodes) / 100)

    def _tell_load(self, node: Node, wait: float) -> None:
        def tell() -> None:
            self._view.load(NodeId(node.name), node.load())
            self._tell_load(node, LOAD_S)

        self._time.at(self._time.now + wait, tell)

    def _tell_events(self, node: Node, wait: float) -> None:
        def tell() -> None:
            self._view.cache(NodeId(node.name), node.cache.news())
            self._tell_events(node, EVENTS_S)

        self._time.at(self._time.now + wait, tell)

    def _arrive(self, number: int, turn: Turn) -> None:
        prompt = (0,) * turn.prompt
        one = in_flight(f"r{number}", prompt, turn.chunks, kind(SHAPE))
        stored = [name in self._store for name in turn.chunks]
        found = self._places.find_placement(one, stored, self._time.now)
        assert isinstance(found, Placement)
        one.record.start_attempt(found, self._places.book_placement(one, found), BASIS)
        job = Job(one, self._time.now, turn.prompt, turn.answer, turn.after)
        job.decode = self._nodes[found.decode]
        self.jobs.append(job)
        if found.prefill is not None:
            job.prefill = self._nodes[found.prefill]
        (job.prefill or job.decode).begin(job)

    def _first(self, node: Node, job: Job) -> None:
        self._view.prefilled(NodeId(node.name), job.request.id)
        if node is job.prefill:
            assert job.decode is not None
            self._view.release(NodeId(node.name), job.request.id)
            job.decode.receive(job, job.arrived)

    def _end(self, job: Job) -> None:
        self._ended += 1
        self._places.release_bookings(job.request)


def figures(jobs: list[Job], options: argparse.Namespace) -> tuple[float, float, float]:
    """Mean TTFT, its p99 (milliseconds), goodput (a share)."""
    ttft = [1000 * job.ttft_s for job in jobs]
    good = [1000 * job.ttft_s <= options.ttft and 1000 * job.itl_s <= options.itl for job in jobs]
    return statistics.mean(ttft), percentile(ttft, 0.99), statistics.mean(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--prefills", type=int, default=4)
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="simulated seconds of arrivals"
    )
    parser.add_argument(
        "--sessions", type=float, default=2.2, help="sessions that start per second"
    )
    parser.add_argument("--seeds", type=int, default=3, help="traces")
    parser.add_argument(
        "--ttft", type=float, default=1000.0, help="TTFT limit of goodput in milliseconds"
    )
    parser.add_argument(
        "--itl", type=float, default=30.0, help="ITL limit of goodput in milliseconds"
    )
    parser.add_argument("--quick", action="store_true", help="one trace of 60 s")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.seeds = 60.0, 1
    traces = [trace(seed, options.seconds, options.sessions) for seed in range(options.seeds)]
    print(
        f"{options.prefills} + {options.decodes} nodes, {sum(map(len, traces))} requests in"
        f" {len(traces)} traces of {options.seconds:g} s; goodput: TTFT <= {options.ttft:g} ms,"
        f" ITL <= {options.itl:g} ms"
    )
    print("| policy | mean TTFT (ms) | p99 TTFT (ms) | goodput |\n|---|---|---|---|")
    found: dict[Ranking, tuple[float, ...]] = {}
    for ranking in RANKINGS:
        each = [figures(Replay(ranking, options).run(turns), options) for turns in traces]
        found[ranking] = tuple(map(statistics.mean, zip(*each, strict=True)))
        mean, tail, good = found[ranking]
        print(f"| `{ranking}` | {mean:.0f} | {tail:.0f} | {good:.1%} |", flush=True)
    mine, others = found["cost"], [found[one] for one in RANKINGS if one != "cost"]
    best = all(mine[0] < other[0] and mine[1] < other[1] and mine[2] > other[2] for other in others)
    print(f"cost is best in each column: goal {'met' if best else 'MISSED'}")
    return exit_code([Verdict(best, "")], quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
