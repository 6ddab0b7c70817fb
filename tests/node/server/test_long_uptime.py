"""A node that idles for a year, or runs for a week, is as it was: by a clock of the tests' own."""

from __future__ import annotations

from contextlib import closing

import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.ipc.messages import Drain, Undrain
from baton_node.server.unacknowledged_jobs import UnacknowledgedJobs
from baton_node.store.null_connector import NoStore
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Abort, JobFailed, Load, NoFirstTokens, PrefillJob, RunJob
from baton_protocol.store import NodeLoad
from tests.support.growth import HOUR_S, YEAR_S, broken_numbers, grown, sizes
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import Pipe, TableNode, tokens_of
from tests.support.nodes.step_loops import LoopNode, alone, hand_off, settle, spin, store_node

ENDED = ErrorRecord("it ended", "engine_error", status=500)
SETTINGS = SimSettings(chunk_blocks=1, max_num_seqs=4)


def prompt(number: int) -> bytes:
    """One of a few: what the cache holds has its own bound."""
    return bytes((number % 5 * 7 + i * 5) % 95 + 32 for i in range(100))


def ways(node: LoopNode, hour: int) -> None:
    """Requests that end in each way: whole, with choices and stop strings, aborted while they wait,
    run or compute, past their time, without their first token, in an older attempt, in a drain."""
    name = f"hour-{hour}"
    alone(node, make_request(f"{name}-whole", prompt(hour), n=2, stop=("~~",)))
    node.take(RunJob(make_request(f"{name}-aborted", prompt(hour + 1), max_tokens=4000)))
    node.loop.turn()
    node.take(Abort(make_request(f"{name}-aborted", b"").id, 1))
    waits = make_request(f"{name}-waits", prompt(hour + 2))
    node.take(RunJob(waits, await_first=True))
    node.loop.turn()
    node.take(NoFirstTokens(waits.id, 1, "it is gone"))
    settle([node])
    node.take(
        PrefillJob(make_request(f"{name}-prefill", prompt(hour + 3)), NodeId("d"), Epoch("e"))
    )
    parked = make_request(f"{name}-parked", prompt(hour + 4))
    node.take(
        RunJob(parked, await_first=True), RunJob(make_request(parked.id, prompt(4), attempt=2))
    )
    settle([node])
    node.take(Drain())
    node.loop.turn()
    node.take(Undrain())
    settle([node])
    # What a test keeps of the node's words is no part of the node.
    node.port.sent.clear()


def test_a_node_that_idled_for_a_year_serves_as_before() -> None:
    node = LoopNode("n0", lambda _: NoStore(), SETTINGS)
    try:
        request = make_request("first", prompt(1))
        ids = alone(node, request)
        for number in range(3):
            node.ahead += YEAR_S
            node.loop.turn()
            assert alone(node, make_request(f"r{number}", prompt(1))) == ids
        loads = [frame for frame in node.port.sent if isinstance(frame, Load)]
        speeds = loads[-1].speeds
        assert speeds.prefill_tokens_per_s > 0
        assert speeds.decode_step_ms > 0
        assert broken_numbers(node.loop) == []
    finally:
        settle([node])
        node.close()


def run_desk(node: LoopNode, hours: int) -> None:
    looks = []
    for hour in range(hours):
        ways(node, hour)
        node.ahead += HOUR_S
        node.loop.turn()
        if hour + 1 in (hours // 2, hours):
            looks.append(sizes(node.loop) + sizes(node.connector))
    # The latest attempts of so many requests are known, which is bounded: see desk.REMEMBERED.
    kept = {path: size for path, size in grown(*looks).items() if not path.endswith("._attempts")}
    assert kept == {}
    assert broken_numbers(node.loop) == []


def test_a_node_that_runs_for_a_day_keeps_nothing_of_it() -> None:
    node = LoopNode("n0", lambda _: NoStore(), SETTINGS)
    try:
        run_desk(node, 24)
    finally:
        settle([node])
        node.close()


@pytest.mark.long
def test_a_node_that_runs_for_a_week_beside_a_store_keeps_nothing_of_it() -> None:
    with EmbeddedStore(64 << 20) as store:
        prefill, decode = store_node("p0", store, SETTINGS), store_node("d0", store, SETTINGS)
        with closing(prefill), closing(decode):
            looks = []
            for hour in range(168):
                request = make_request(f"handed-{hour}", prompt(hour))
                hand_off(prefill, decode, request)
                spin([prefill, decode], lambda: len(decode.ids(request.id)) == 7, "the answer")  # noqa: B023
                for node in (prefill, decode):
                    node.port.sent.clear()
                    node.ahead += HOUR_S
                settle([prefill, decode])
                if hour + 1 in (84, 168):
                    both = (prefill, decode)
                    looks.append(sum((sizes(node.loop) for node in both), sizes(())))
            found = {path for path in grown(*looks) if not path.endswith("._attempts")}
            assert found == set()


def test_of_requests_that_are_over_the_server_keeps_nothing() -> None:
    """A week of routers that come, lose their links, and come back or not."""
    node = TableNode()
    looks = []
    for hour in range(168):
        for number in range(20):
            link = Pipe()
            request = make_request(f"r{hour}-{number}", b"prompt")
            node.take(RunJob(request), link)
            end = number % 4
            if end == 0:
                node.table.abort(Abort(request.id, 1))
            elif end == 1:
                node.table.orphan(link)
            elif end == 2:
                node.table.failed(JobFailed(request.id, 1, ENDED))
            else:
                node.say(*tokens_of(request, 0, [65] * 8))
            node.clock.advance(HOUR_S / 20)
            node.table.tidy()
        node.sent.clear()
        node.spans.clear()
        if hour in (83, 167):
            looks.append(sizes(node.table))
    # The newest 4,096 aborts are known, in case they were faster than their jobs.
    assert {path for path in grown(*looks) if not path.endswith("._aborted")} == set()
    assert len(node.table) == 0


def test_what_the_engine_has_taken_is_not_counted_again_after_many_jobs() -> None:
    untaken = UnacknowledgedJobs()
    job = RunJob(make_request("r", b"prompt"))
    for number in range(100_000):
        untaken.given(job)
        untaken.taken(number)
    assert untaken.added_to(NodeLoad()).waiting == 1
    assert sizes(untaken)["UnacknowledgedJobs._waiting"] == 1
