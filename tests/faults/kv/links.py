"""Rows of the KV fault matrix: what befalls the links between nodes and servers.

In: nothing. Out: FAULTS. The links are LinkProxies; what they count shows that something happened.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from tests.faults.kv.cells import (
    Act,
    Cell,
    Deadline,
    Fault,
    all_of,
    everything_fetched,
    fetching,
    some_lost,
)
from tests.faults.kv.servers import timed_out
from tests.support.kv_faults.stage import CHUNKS, LARGE, Stage
from tests.support.wires.link_proxy import Mishap

SLOW = 1_000_000.0  # bytes per second
# Between two mishaps. A hand-off moves 200 kB of values, and some kB of markers and inbox entries.
LOSSY_BYTES = {"data0": 25_000, "index": 2_500}
FLIP_BYTES = {"data0": 15_000}


def slow(*nodes: str) -> Act:
    """A hand-off over a slow link, from its first byte."""

    def play(stage: Stage) -> None:
        for name in ("p0", "d0"):
            stage.node(name)
        links = [stage.link(name, "data0") for name in nodes]
        for link in links:
            link.slow(SLOW)
        before = [link.passed.total() for link in links]
        began = time.monotonic()
        stage.strike(lambda _: None)
        stage.hand_off("p0", "d0")
        stage.settle()
        taken = time.monotonic() - began
        passed = [link.passed.total() - had for link, had in zip(links, before, strict=True)]
        assert min(passed) > stage.layout.chunk_bytes * CHUNKS / 2
        assert taken > max(passed) / SLOW / 2  # both directions have this rate
        assert stage.node("p0").refused() == []
        assert stage.node("d0").loop.counters.reused_chunks > 0

    return play


def act_on_link(act: str) -> Act:
    def strike(stage: Stage) -> None:
        getattr(stage.link("d0", "data0"), act)()

    return strike


def lossy(seed: int, kinds: Sequence[Mishap], mean_bytes: dict[str, int], bites: Act) -> Act:
    """Mishaps on each link of a hand-off, and of a request that looks its prompt up."""

    def play(stage: Stage) -> None:
        for name in ("p0", "d0", "d1"):
            stage.node(name)
            for server, mean in mean_bytes.items():
                stage.link(name, server).lossy(mean, *kinds, seed=f"{seed} {name} {server}")
        stage.strike(lambda _: None)
        stage.hand_off("p0", "d0")
        again = stage.ask("again")
        stage.strike(lambda _: None)
        stage.run("d1", again)
        stage.compare_pages("d1", again)
        met: Counter[Mishap] = stage.mishaps()
        assert all(met[kind] for kind in kinds), met
        bites(stage)

    return play


def bytes_refused(stage: Stage) -> None:
    troubles = [*stage.node("p0").refused(), *stage.node("d0").lost(), *stage.node("d1").lost()]
    assert troubles


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="slow link",
        how="1 MB/s between data and the prefill node, the decode node, or both; 128 KiB chunks",
        seen="the bytes took their time; no put was refused, and what came was used",
        deadline=Deadline(transfers=1, chunks=True, link_bytes_per_s=SLOW),
        cells=(
            Cell(case="decode", play=slow("d0"), settings=LARGE),
            Cell(case="prefill", play=slow("p0"), settings=LARGE, long=True),
            Cell(case="both", play=slow("p0", "d0"), settings=LARGE, long=True),
        ),
    ),
    Fault(
        name="link cut in a value",
        how="connections are reset in the middle of a value, once or until the request's end",
        seen="once: asked for again, nothing lost; for long: what did not come is counted lost",
        deadline=Deadline(transfers=1),
        cells=(
            Cell(case="once", play=fetching(act_on_link("cut"), everything_fetched)),
            Cell(
                case="for long",
                play=fetching(act_on_link("refuse"), some_lost, link_stays=True),
            ),
        ),
    ),
    Fault(
        name="link stalled in a value",
        how="in the middle of a value nothing flows any more; connections stay",
        seen="the transfer ends at its deadline and is counted lost; the others are not waited for",
        deadline=Deadline(transfers=1, connects=1),
        cells=(
            Cell(
                case="until the end",
                play=fetching(act_on_link("hold"), all_of(some_lost, timed_out), link_stays=True),
            ),
        ),
    ),
    Fault(
        name="lossy link",
        how="each link of a hand-off and of a lookup, data and index, is cut or stalls about every "
        "25 kB of values and 2.5 kB of the index",
        seen="both kinds of mishap were counted",
        deadline=Deadline(transfers=1, connects=1, index=1, chunks=True),
        cells=tuple(
            Cell(
                case=f"seed {seed}",
                play=lossy(seed, ("stall", "cut"), LOSSY_BYTES, lambda _: None),
                long=seed > 1,
            )
            for seed in range(1, 21)
        ),
    ),
    Fault(
        name="bits flipped on the link",
        how="one bit about every 15 kB, in values, keys and the protocol itself, both directions",
        seen="flips were counted, and chunks refused or lost",
        deadline=Deadline(transfers=2, connects=1, chunks=True),
        cells=tuple(
            Cell(
                case=f"seed {seed}",
                play=lossy(seed, ("flip",), FLIP_BYTES, bytes_refused),
                long=seed > 1,
            )
            for seed in range(1, 21)
        ),
    ),
)
