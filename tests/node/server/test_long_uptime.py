"""A node still works after idle years, and does not grow in a week of work. The clock is fake."""

from __future__ import annotations

from contextlib import closing

import pytest

from baton_engine.sim.build import SimSettings
from baton_kvstore.embedded.servers import EmbeddedStore
from baton_node.ipc.messages import Drain, Undrain
from baton_node.server.uncounted_jobs import UncountedJobs
from baton_protocol.errors import ErrorRecord
from baton_protocol.ids import Epoch, NodeId
from baton_protocol.link import Abort, JobFailed, Load, NoFirstTokens, PrefillJob, RunJob
from baton_protocol.store import NodeLoad
from tests.support.growth import HOUR_S, YEAR_S, grown, nan_paths, sizes
from tests.support.nodes.processes import make_request
from tests.support.nodes.request_tables import FakeLink, TableNode, tokens_of
from tests.support.nodes.step_loops import LoopNode, hand_off, run_alone, settle, spin, store_node

FAILURE = ErrorRecord("it failed", "engine_error", status=500)
SETTINGS = SimSettings(chunk_blocks=1, max_num_seqs=4)


def prompt(number: int) -> bytes:
    """One of 5 prompts, since the cache may grow up to its own bound."""
    return bytes((number % 5 * 7 + i * 5) % 95 + 32 for i in range(100))


def run_hour(node: LoopNode, hour: int) -> None:
    """Run requests that end in different ways: complete, with two choices and a stop string;
    aborted; without first tokens; as a prefill job; replaced by a newer attempt; in a drain."""
    name = f"hour-{hour}"
    run_alone(node, make_request(f"{name}-whole", prompt(hour), n=2, stop=("~~",)))
    node.take(RunJob(make_request(f"{name}-aborted", prompt(hour + 1), max_tokens=4000)))
    node.loop.turn()
    node.take(Abort(make_request(f"{name}-aborted", b"").id, 1))
    waiting = make_request(f"{name}-waits", prompt(hour + 2))
    node.take(RunJob(waiting, await_first=True))
    node.loop.turn()
    node.take(NoFirstTokens(waiting.id, 1, "it is gone"))
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
    # The frames that the fake port keeps are not the node's memory.
    node.port.sent.clear()


def test_a_node_without_work_for_years_serves_as_before() -> None:
    node = LoopNode("n0", SETTINGS)
    try:
        request = make_request("first", prompt(1))
        ids = run_alone(node, request)
        for number in range(3):
            node.clock_ahead_s += YEAR_S
            node.loop.turn()
            assert run_alone(node, make_request(f"r{number}", prompt(1))) == ids
        loads = [frame for frame in node.port.sent if isinstance(frame, Load)]
        speeds = loads[-1].speeds
        assert speeds.prefill_tokens_per_s > 0
        assert speeds.decode_step_ms > 0
        assert nan_paths(node.loop) == []
    finally:
        settle([node])
        node.close()


def check_growth(node: LoopNode, hours: int) -> None:
    samples = []
    for hour in range(hours):
        run_hour(node, hour)
        node.clock_ahead_s += HOUR_S
        node.loop.turn()
        if hour + 1 in (hours // 2, hours):
            samples.append(sizes(node.loop) + sizes(node.connector))
    # _attempts is bounded by baton_node.engine.loop.REMEMBERED.
    grew = {path: size for path, size in grown(*samples).items() if not path.endswith("._attempts")}
    assert grew == {}
    assert nan_paths(node.loop) == []


def test_a_node_does_not_grow_in_a_day_of_work() -> None:
    node = LoopNode("n0", SETTINGS)
    try:
        check_growth(node, 24)
    finally:
        settle([node])
        node.close()


@pytest.mark.long
def test_a_node_with_a_store_does_not_grow_in_a_week_of_work() -> None:
    with EmbeddedStore(64 << 20) as store:
        prefill, decode = store_node("p0", store, SETTINGS), store_node("d0", store, SETTINGS)
        with closing(prefill), closing(decode):
            samples = []
            for hour in range(168):
                request = make_request(f"handed-{hour}", prompt(hour))
                hand_off(prefill, decode, request)
                spin([prefill, decode], lambda: len(decode.ids(request.id)) == 7, "the answer")  # noqa: B023
                for node in (prefill, decode):
                    node.port.sent.clear()
                    node.clock_ahead_s += HOUR_S
                settle([prefill, decode])
                if hour + 1 in (84, 168):
                    both = (prefill, decode)
                    samples.append(sum((sizes(node.loop) for node in both), sizes(())))
            grew = {path for path in grown(*samples) if not path.endswith("._attempts")}
            assert grew == set()


def test_the_server_does_not_keep_ended_requests() -> None:
    """One week of requests that are aborted, lose their link, fail or finish."""
    node = TableNode()
    samples = []
    for hour in range(168):
        for number in range(20):
            link = FakeLink()
            request = make_request(f"r{hour}-{number}", b"prompt")
            node.take(RunJob(request), link)
            way = number % 4
            if way == 0:
                node.table.abort_request(Abort(request.id, 1))
            elif way == 1:
                node.table.orphan_requests(link)
            elif way == 2:
                node.table.fail_request(JobFailed(request.id, 1, FAILURE))
            else:
                node.emit(*tokens_of(request, 0, [65] * 8))
            node.clock.advance(HOUR_S / 20)
            node.table.drop_expired()
        node.sent.clear()
        node.spans.clear()
        if hour in (83, 167):
            samples.append(sizes(node.table))
    # _aborted is bounded by KeptLimits.aborted.
    assert {path for path in grown(*samples) if not path.endswith("._aborted")} == set()
    assert len(node.table) == 0


def test_jobs_that_the_engine_has_received_are_forgotten() -> None:
    uncounted = UncountedJobs()
    job = RunJob(make_request("r", b"prompt"))
    for number in range(100_000):
        uncounted.add_job(job)
        uncounted.drop_counted(number)
    assert uncounted.add_to_load(NodeLoad()).waiting == 1
    assert sizes(uncounted)["UncountedJobs._waiting"] == 1
