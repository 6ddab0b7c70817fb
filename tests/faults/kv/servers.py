"""Rows of the KV fault matrix: what befalls the servers.

In: nothing. Out: FAULTS. Each way to hurt a server, on each role, at each moment that it can bite.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.kv.cells import (
    Act,
    Cell,
    Deadline,
    Fault,
    all_of,
    everything_fetched,
    fetching,
    lost,
    nothing_fetched,
    publishing,
    some_lost,
    some_refused,
    some_unmarked,
    stored,
)
from tests.support.kv_faults.stage import CHUNKS, OTHER, Stage

DATA, INDEX, BOTH = ("data0",), ("index",), ("index", "data0")


def on(act: str, servers: tuple[str, ...]) -> Act:
    def strike(stage: Stage) -> None:
        stage.hurt(act, *servers)

    return strike


def flush(*servers: str) -> Act:
    def strike(stage: Stage) -> None:
        for server in servers:
            with stage.client(server) as client:
                client.flushall()

    return strike


def fill(server: str, policy: str) -> Act:
    """Not a byte is left; what `policy` allows goes."""

    def strike(stage: Stage) -> None:
        with stage.client(server) as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", 1)

    return strike


def other_prompt_refused(stage: Stage) -> None:
    """A full server takes no more chunks (the reads were served)."""
    stage.publish_in_vain(stage.ask("other", OTHER))
    some_refused(stage, 2 * CHUNKS)


def timed_out(stage: Stage) -> None:
    assert any("in time" in reason for reason in stage.node("d0").lost())


def _dying(name: str, how: str, act: str, deadline: Deadline, short: Sequence[str]) -> Fault:
    """A server that goes: on each role, at each moment. The `short` cases are for every run."""
    bitten = all_of(some_lost, some_refused) if act != "restart" else some_lost
    unmarked = some_refused if act != "restart" else some_unmarked
    plays = (
        ("data, stored", stored(on(act, DATA), nothing_fetched)),
        ("data, publishing", publishing(on(act, DATA), bitten)),
        ("data, fetching", fetching(on(act, DATA), some_lost)),
        ("index, stored", stored(on(act, INDEX), nothing_fetched)),
        ("index, publishing", publishing(on(act, INDEX), unmarked, server="index")),
        ("both, stored", stored(on(act, BOTH), nothing_fetched)),
        ("both, publishing", publishing(on(act, BOTH), bitten)),
    )
    return Fault(
        name=name,
        how=how,
        seen="what was on the server is neither fetched nor believed; puts under way are refused",
        deadline=deadline,
        cells=tuple(Cell(case=case, play=play, long=case not in short) for case, play in plays),
    )


def one_of_two(act: str) -> Act:
    def play(stage: Stage) -> None:
        stage.publish(stage.spread_request())
        there = stage.on_server("data0")
        stage.node("d0")
        stage.strike(on(act, ("data1",)))
        stage.run("d0")
        node = stage.node("d0")
        assert 0 < len(there) < CHUNKS
        assert node.fetched() == len(there)
        assert node.loop.counters.reused_chunks == len(there)

    return play


FAULTS: tuple[Fault, ...] = (
    _dying(
        "kill -9",
        "SIGKILL to data, index or both; they come back empty after 0.2 s",
        "kill",
        Deadline(transfers=1, chunks=True),
        ("data, publishing", "index, stored"),
    ),
    _dying(
        "gone for good",
        "SIGKILL, and nobody starts it again before the request's end",
        "take_away",
        Deadline(transfers=1, chunks=True),
        ("data, stored", "index, publishing"),
    ),
    _dying(
        "SIGSTOP",
        "the server stands still until the request's end; connections stay",
        "freeze",
        Deadline(transfers=1, connects=1, index=1, chunks=True),
        ("data, fetching", "index, publishing"),
    ),
    _dying(
        "restart empty",
        "killed, and up again with another run id before anybody asks",
        "restart",
        Deadline(transfers=1, chunks=True),
        ("data, stored", "index, publishing"),
    ),
    Fault(
        name="one of two data servers lost",
        how="two data servers hold a prompt; one is killed, away or stopped; stored",
        seen="the other's chunks are fetched and used, before and behind the holes",
        deadline=Deadline(transfers=1, connects=1),
        cells=(
            Cell(case="kill -9", play=one_of_two("kill"), instances=2),
            Cell(case="gone", play=one_of_two("take_away"), instances=2, long=True),
            Cell(case="SIGSTOP", play=one_of_two("freeze"), instances=2, long=True),
        ),
    ),
    Fault(
        name="data lost while the index lives",
        how="FLUSHALL on data: every marker is there, no value is; all three moments",
        seen="each chunk asked for is counted lost, its marker dropped, recomputed, put again",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(case="stored", play=stored(flush("data0"), lost(CHUNKS, "missing")), long=True),
            Cell(case="publishing", play=publishing(flush("data0"), some_lost)),
            Cell(case="fetching", play=fetching(flush("data0"), some_lost), long=True),
        ),
    ),
    Fault(
        name="index lost while data lives",
        how="FLUSHALL on the index: values are there that nobody names; stored, publishing",
        seen="nothing is found; the same chunks are put again over the old values",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(case="stored", play=stored(flush("index"), nothing_fetched), long=True),
            Cell(
                case="publishing",
                play=publishing(flush("index"), some_unmarked, server="index"),
            ),
        ),
    ),
    Fault(
        name="maxmemory reached",
        how="maxmemory 1: data that may evict nothing, data that evicts all, the index",
        seen="puts are refused and counted, reads are served; what was evicted is counted lost",
        deadline=Deadline(transfers=1, chunks=True),
        cells=(
            Cell(
                case="data keeps, stored",
                play=stored(
                    fill("data0", "noeviction"), all_of(everything_fetched, other_prompt_refused)
                ),
                long=True,
            ),
            Cell(
                case="data keeps, publishing",
                play=publishing(fill("data0", "noeviction"), some_refused),
            ),
            Cell(
                case="data evicts, stored",
                play=stored(fill("data0", "volatile-ttl"), lost(CHUNKS, "missing")),
            ),
            Cell(
                case="data evicts, fetching",
                play=fetching(fill("data0", "volatile-ttl"), some_lost),
                long=True,
            ),
            Cell(
                case="index, stored",
                play=stored(
                    fill("index", "noeviction"), all_of(everything_fetched, other_prompt_refused)
                ),
                long=True,
            ),
            Cell(
                case="index, publishing",
                play=publishing(fill("index", "noeviction"), some_refused, server="index"),
            ),
        ),
    ),
)
