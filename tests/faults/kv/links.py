"""Rows of the KV fault matrix: slow, cut, stalled and lossy links between nodes and servers.

In: nothing. Out: FAULTS. The links are LinkProxies, whose counters show that a fault had an effect.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from tests.faults.kv.cells import (
    Action,
    Cell,
    Deadline,
    Fault,
    all_fetched,
    all_of,
    fetching,
    some_lost,
)
from tests.faults.kv.servers import timed_out
from tests.support.kv_faults.testbed import CHUNKS, LARGE, KVTestbed
from tests.support.wires.link_proxy import Mishap

SLOW = 1_000_000.0  # bytes per second
# Mean bytes between two mishaps. A hand-off moves 200 kB of values, and a few kB of markers and
# inbox entries.
LOSSY_BYTES = {"data0": 25_000, "index": 2_500}
FLIP_BYTES = {"data0": 15_000}


def slow(*nodes: str) -> Action:
    """Run a hand-off over slow links from its first byte on."""

    def run(testbed: KVTestbed) -> None:
        for name in ("p0", "d0"):
            testbed.node(name)
        links = [testbed.link(name, "data0") for name in nodes]
        for link in links:
            link.slow(SLOW)
        before = [link.passed.total() for link in links]
        began = time.monotonic()
        testbed.inject(lambda _: None)
        testbed.hand_off("p0", "d0")
        testbed.settle()
        elapsed = time.monotonic() - began
        passed = [
            link.passed.total() - passed_before
            for link, passed_before in zip(links, before, strict=True)
        ]
        assert min(passed) > testbed.layout.chunk_bytes * CHUNKS / 2
        assert elapsed > max(passed) / SLOW / 2  # both directions have this rate
        assert testbed.node("p0").refused() == []
        assert testbed.node("d0").loop.counters["reused_chunks"] > 0

    return run


def link_fault(method: str) -> Action:
    def inject(testbed: KVTestbed) -> None:
        getattr(testbed.link("d0", "data0"), method)()

    return inject


def lossy(seed: int, kinds: Sequence[Mishap], mean_bytes: dict[str, int], check: Action) -> Action:
    """Cause mishaps on each link of a hand-off, and of a request that looks up its prompt."""

    def run(testbed: KVTestbed) -> None:
        for name in ("p0", "d0", "d1"):
            testbed.node(name)
            for server, mean in mean_bytes.items():
                testbed.link(name, server).lossy(mean, *kinds, seed=f"{seed} {name} {server}")
        testbed.inject(lambda _: None)
        testbed.hand_off("p0", "d0")
        again = testbed.make_request("again")
        testbed.inject(lambda _: None)
        testbed.run("d1", again)
        testbed.compare_pages("d1", again)
        mishaps: Counter[Mishap] = testbed.mishaps()
        assert all(mishaps[kind] for kind in kinds), mishaps
        check(testbed)

    return run


def some_refused_or_lost(testbed: KVTestbed) -> None:
    reasons = [
        *testbed.node("p0").refused(),
        *testbed.node("d0").lost(),
        *testbed.node("d1").lost(),
    ]
    assert reasons


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="slow link",
        how="1 MB/s between data and the prefill node, the decode node, or both; 128 KiB chunks",
        checks="the transfer takes as long as the rate requires; no put is refused; chunks are "
        "used",
        deadline=Deadline(transfers=1, chunks=True, link_bytes_per_s=SLOW),
        cells=(
            Cell(case="decode", run=slow("d0"), settings=LARGE),
            Cell(case="prefill", run=slow("p0"), settings=LARGE, long=True),
            Cell(case="both", run=slow("p0", "d0"), settings=LARGE, long=True),
        ),
    ),
    Fault(
        name="link cut in a value",
        how="connections are reset in the middle of a value, once or until the request's end",
        checks="once: the value is fetched again, nothing is lost; for long: missing chunks are "
        "counted lost",
        deadline=Deadline(transfers=1),
        cells=(
            Cell(case="once", run=fetching(link_fault("cut"), all_fetched)),
            Cell(
                case="for long",
                run=fetching(link_fault("refuse"), some_lost, link_stays=True),
            ),
        ),
    ),
    Fault(
        name="link stalled in a value",
        how="no more bytes flow from the middle of a value on; connections stay open",
        checks="the transfer ends at its deadline and is counted lost; the request does not wait "
        "for the others",
        deadline=Deadline(transfers=1, connects=1),
        cells=(
            Cell(
                case="until the end",
                run=fetching(link_fault("hold"), all_of(some_lost, timed_out), link_stays=True),
            ),
        ),
    ),
    Fault(
        name="lossy link",
        how="each link of a hand-off and of a lookup, data and index, is cut or stalls about every "
        "25 kB of values and 2.5 kB of the index",
        checks="both kinds of mishap were counted",
        deadline=Deadline(transfers=1, connects=1, index=1, chunks=True),
        cells=tuple(
            Cell(
                case=f"seed {seed}",
                run=lossy(seed, ("stall", "cut"), LOSSY_BYTES, lambda _: None),
                long=seed > 1,
            )
            for seed in range(1, 21)
        ),
    ),
    Fault(
        name="bits flipped on the link",
        how="one bit about every 15 kB in both directions, in values, keys and the protocol itself",
        checks="flips were counted; some chunks were refused or lost",
        deadline=Deadline(transfers=2, connects=1, chunks=True),
        cells=tuple(
            Cell(
                case=f"seed {seed}",
                run=lossy(seed, ("flip",), FLIP_BYTES, some_refused_or_lost),
                long=seed > 1,
            )
            for seed in range(1, 21)
        ),
    ),
)
