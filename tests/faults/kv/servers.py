"""Rows of the KV fault matrix: servers that die, freeze, restart, lose data or are full.

In: nothing. Out: FAULTS. Each fault of a server, for each role, at each moment at which it matters.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.faults.kv.cells import (
    Action,
    Cell,
    Deadline,
    Fault,
    all_fetched,
    all_of,
    fetching,
    lost,
    nothing_fetched,
    of_each_kind,
    publishing,
    some_lost,
    some_refused,
    some_unmarked,
    stored,
)
from tests.support.kv_faults.testbed import CHUNKS, OTHER, KVTestbed

DATA, INDEX, BOTH = ("data0",), ("index",), ("index", "data0")


def on(act: str, servers: tuple[str, ...]) -> Action:
    def inject(testbed: KVTestbed) -> None:
        testbed.break_servers(act, *servers)

    return inject


def kill_and_cut(testbed: KVTestbed) -> None:
    """Kill the data server, and lose what it has sent."""
    on("kill", DATA)(testbed)
    testbed.link("d0", "data0").cut()


def flush(*servers: str) -> Action:
    def inject(testbed: KVTestbed) -> None:
        for server in servers:
            with testbed.client(server) as client:
                client.flushall()

    return inject


def fill(server: str, policy: str) -> Action:
    """Leave no byte free; the server evicts what `policy` allows."""

    def inject(testbed: KVTestbed) -> None:
        with testbed.client(server) as client:
            client.config_set("maxmemory-policy", policy)
            client.config_set("maxmemory", 1)

    return inject


def other_prompt_refused(testbed: KVTestbed) -> None:
    """Assert that a full server accepts no more chunks. The reads were served before."""
    testbed.try_publish(testbed.make_request("other", OTHER))
    some_refused(testbed, prompts=2)


def timed_out(testbed: KVTestbed) -> None:
    assert any("in time" in reason for reason in testbed.node("d0").lost())


def _server_fault(
    name: str,
    how: str,
    act: str,
    deadline: Deadline,
    short: Sequence[str],
    for_kinds: Sequence[tuple[str, Action]] = (),
) -> Fault:
    """A fault of a server, for each role and moment. The `short` cases run always. Those in
    `for_kinds` run with each kind of KV."""
    data_check = all_of(some_lost, some_refused) if act != "restart" else some_lost
    index_check = some_refused if act != "restart" else some_unmarked
    runs = (
        ("data, stored", stored(on(act, DATA), nothing_fetched)),
        ("data, publishing", publishing(on(act, DATA), data_check)),
        ("data, fetching", fetching(on(act, DATA), some_lost)),
        ("index, stored", stored(on(act, INDEX), nothing_fetched)),
        ("index, publishing", publishing(on(act, INDEX), index_check, server="index")),
        ("both, stored", stored(on(act, BOTH), nothing_fetched)),
        ("both, publishing", publishing(on(act, BOTH), data_check)),
    )
    return Fault(
        name=name,
        how=how,
        checks="the server's chunks are not fetched; puts in flight are refused",
        deadline=deadline,
        cells=(
            *(Cell(case=case, run=run, long=case not in short) for case, run in runs),
            *(cell for case, run in for_kinds for cell in of_each_kind(case, run)),
        ),
    )


def one_of_two(act: str) -> Action:
    def run(testbed: KVTestbed) -> None:
        testbed.publish(testbed.spread_request())
        left = testbed.on_server("data0")
        testbed.node("d0")
        testbed.inject(on(act, ("data1",)))
        testbed.run("d0")
        node = testbed.node("d0")
        assert 0 < len(left) < CHUNKS
        assert node.fetched() == len(left)
        assert node.loop.counters["reused_chunks"] == len(left)

    return run


FAULTS: tuple[Fault, ...] = (
    _server_fault(
        "kill -9",
        "SIGKILL to data, index or both; they restart empty after 0.2 s",
        "kill",
        Deadline(transfers=1, chunks=True),
        ("data, publishing", "index, stored"),
        for_kinds=(
            ("data, publishing", publishing(on("kill", DATA), all_of(some_lost, some_refused))),
            ("data, fetching", fetching(kill_and_cut, some_lost)),
        ),
    ),
    _server_fault(
        "gone for good",
        "SIGKILL, and no restart before the request's end",
        "take_away",
        Deadline(transfers=1, chunks=True),
        ("data, stored", "index, publishing"),
    ),
    _server_fault(
        "SIGSTOP",
        "the server is frozen until the request's end; connections stay open",
        "freeze",
        Deadline(transfers=1, connects=1, index=1, chunks=True),
        ("data, fetching", "index, publishing"),
    ),
    _server_fault(
        "restart empty",
        "killed, and restarted with another run id before the next command",
        "restart",
        Deadline(transfers=1, chunks=True),
        ("data, stored", "index, publishing"),
    ),
    Fault(
        name="one of two data servers lost",
        how="two data servers hold a prompt; one is killed, down or frozen; stored",
        checks="the other server's chunks are fetched and used, before and after the holes",
        deadline=Deadline(transfers=1, connects=1),
        cells=(
            Cell(case="kill -9", run=one_of_two("kill"), instances=2),
            Cell(case="gone", run=one_of_two("take_away"), instances=2, long=True),
            Cell(case="SIGSTOP", run=one_of_two("freeze"), instances=2, long=True),
        ),
    ),
    Fault(
        name="data lost while the index lives",
        how="FLUSHALL on data: all markers exist, no value does; all three moments",
        checks="each requested chunk is counted lost, its marker dropped; it is computed and put "
        "again",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(case="stored", run=stored(flush("data0"), lost(CHUNKS, "missing")), long=True),
            Cell(case="publishing", run=publishing(flush("data0"), some_lost)),
            Cell(case="fetching", run=fetching(flush("data0"), some_lost), long=True),
        ),
    ),
    Fault(
        name="index lost while data lives",
        how="FLUSHALL on the index: values exist without markers; stored, publishing",
        checks="nothing is found; the same chunks are put again over the old values",
        deadline=Deadline(chunks=True),
        cells=(
            Cell(case="stored", run=stored(flush("index"), nothing_fetched), long=True),
            Cell(
                case="publishing",
                run=publishing(flush("index"), some_unmarked, server="index"),
            ),
        ),
    ),
    Fault(
        name="maxmemory reached",
        how="maxmemory 1: on data that may evict nothing, on data that evicts all, on the index",
        checks="puts are refused and counted; reads are served; evicted chunks are counted lost",
        deadline=Deadline(transfers=1, chunks=True),
        cells=(
            Cell(
                case="data keeps, stored",
                run=stored(fill("data0", "noeviction"), all_of(all_fetched, other_prompt_refused)),
                long=True,
            ),
            Cell(
                case="data keeps, publishing",
                run=publishing(fill("data0", "noeviction"), some_refused),
            ),
            Cell(
                case="data evicts, stored",
                run=stored(fill("data0", "volatile-ttl"), lost(CHUNKS, "missing")),
            ),
            Cell(
                case="data evicts, fetching",
                run=fetching(fill("data0", "volatile-ttl"), some_lost),
                long=True,
            ),
            Cell(
                case="index, stored",
                run=stored(fill("index", "noeviction"), all_of(all_fetched, other_prompt_refused)),
                long=True,
            ),
            Cell(
                case="index, publishing",
                run=publishing(fill("index", "noeviction"), some_refused, server="index"),
            ),
        ),
    ),
)
