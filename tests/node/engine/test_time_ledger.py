"""A step loop books each moment: to the tenants of the step that it ran, by cause, or as idle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec
import pytest

from baton_engine.sim.build import SimSettings
from baton_node.engine.time_ledger import TimeLedger
from baton_node.ipc.messages import Step
from baton_protocol.link import Abort, RunJob
from baton_protocol.request import Request
from baton_protocol.usage import MAX_TENANTS, OTHER_TENANTS, NodeTime, TimeSpent
from tests.support.clock import Clock
from tests.support.nodes.processes import make_request
from tests.support.nodes.step_loops import LoopNode

STEP_S = 10.0  # that each turn takes, beside which real time does not count
NEAR = 0.02


@pytest.fixture
def node() -> Iterator[LoopNode]:
    node = LoopNode("n0", SimSettings(chunk_blocks=1, num_blocks=12, max_batched_tokens=64))
    yield node
    node.close()


def of_tenant(request: Request, tenant: str) -> Request:
    return msgspec.structs.replace(request, tenant=tenant)


def turn(node: LoopNode, times: int = 1) -> None:
    for _ in range(times):
        node.clock_ahead_s += STEP_S
        node.loop.turn()


def finish(node: LoopNode) -> None:
    while not node.loop.idle or node.engine.has_work():
        turn(node)


def booked(node: LoopNode) -> dict[tuple[str, str], float]:
    """Turns of each tenant and cause, once the rows are sure to add up to the time that passed."""
    time = node.loop._ledger.report()
    assert sum(row.ms for row in time.rows) == pytest.approx(time.wall_ms)
    turns: dict[tuple[str, str], float] = defaultdict(float)
    for row in time.rows:
        turns[row.tenant, row.cause] += row.ms / 1000 / STEP_S
    return turns


def test_a_request_pays_for_its_prompt_and_for_each_later_token(node: LoopNode) -> None:
    turn(node, 2)
    node.take(RunJob(of_tenant(make_request("r", b"p" * 100, max_tokens=4), "acme")))
    turn(node)
    finish(node)
    turn(node, 3)
    turns = booked(node)
    # The turn in which a request arrives ends an idle time. Its prompt takes 64 tokens and then 36.
    assert turns["acme", "prefill"] == pytest.approx(1, abs=NEAR)
    assert turns["acme", "decode"] == pytest.approx(3, abs=NEAR)
    assert turns["", "idle"] == pytest.approx(6, abs=NEAR)


def test_requests_of_one_step_share_its_time_by_their_tokens(node: LoopNode) -> None:
    node.take(RunJob(of_tenant(make_request("a", b"a" * 16, max_tokens=5), "few")))
    turn(node, 2)
    before = booked(node)["few", "decode"]
    node.take(RunJob(of_tenant(make_request("b", b"b" * 31, max_tokens=1), "many")))
    turn(node)
    turns = booked(node)
    assert turns["many", "prefill"] == pytest.approx(31 / 32, abs=NEAR)
    assert turns["few", "decode"] - before == pytest.approx(1 / 32, abs=NEAR)
    finish(node)


def test_known_tokens_after_a_loss_count_as_such_except_the_newest(node: LoopNode) -> None:
    request = make_request("r", b"p" * 20, attempt=2, max_tokens=20)
    lost = msgspec.structs.replace(request, outputs=(tuple(b"abcdefghij"),), after_loss=True)
    node.take(RunJob(make_request("first", b"q" * 4, max_tokens=30)))
    turn(node)
    before = booked(node)
    node.take(RunJob(of_tenant(lost, "acme")))
    turn(node)
    turns = booked(node)
    assert turns["acme", "lost"] == pytest.approx(29 / 31, abs=NEAR)
    assert turns["acme", "decode"] == pytest.approx(1 / 31, abs=NEAR)
    assert ("acme", "prefill") not in turns
    assert turns["", "decode"] - before["", "decode"] == pytest.approx(1 / 31, abs=NEAR)
    finish(node)


def test_tokens_that_a_preempted_request_computes_again_count_as_evicted(node: LoopNode) -> None:
    for name in ("old", "young"):
        fields = {"max_tokens": 90, "ignore_eos": True}
        node.take(RunJob(of_tenant(make_request(name, name.encode() * 8, **fields), name)))
    turn(node)
    finish(node)
    assert node.engine.load().preemptions_total > 0
    turns = booked(node)
    assert turns["young", "evicted"] > 0
    assert ("old", "evicted") not in turns
    for name in ("old", "young"):
        assert turns[name, "prefill"] > 0
        assert turns[name, "decode"] > 0


def test_a_request_s_time_comes_with_its_last_token(node: LoopNode) -> None:
    node.take(RunJob(make_request("r", b"p" * 10, max_tokens=3, ignore_eos=True)))
    turn(node)
    finish(node)
    [spent] = [one for frame in node.port.sent if isinstance(frame, Step) for one in frame.spent]
    assert spent.request == "r"
    assert spent.time.decode_ms == pytest.approx(2 * 1000 * STEP_S, rel=NEAR)
    assert spent.time.lost_ms == spent.time.evicted_ms == 0
    first = node.prompted("r").stats.spent
    assert first == TimeSpent(prefill_ms=spent.time.prefill_ms)


def test_the_server_gets_the_time_again_and_again_and_at_the_end(node: LoopNode) -> None:
    turn(node, 3)
    times = [frame for frame in node.port.sent if isinstance(frame, NodeTime)]
    assert len(times) == 3
    assert [row.cause for row in times[-1].rows] == ["idle"]


def test_tenants_beyond_the_limit_share_one_row() -> None:
    ledger = TimeLedger(Clock())
    for number in range(MAX_TENANTS + 5):
        ledger.open_account(f"t{number}").tenant.decode += 1.0
    rows = {row.tenant: row.ms for row in ledger.report().rows}
    assert rows[OTHER_TENANTS] == 5000.0
    assert len(rows) == MAX_TENANTS + 2  # and idle


def test_time_of_a_step_under_way_when_a_request_ends_is_the_request_s() -> None:
    """With two steps under way, a request may end while a step computes its next token."""
    node = LoopNode("n0", SimSettings(chunk_blocks=1, overlap=True))
    request = make_request("r", b"p" * 10, max_tokens=9, ignore_eos=True)
    node.take(RunJob(of_tenant(request, "acme")))
    turn(node, 3)
    node.take(Abort(request.id, request.attempt))
    turn(node, 3)
    turns = booked(node)
    assert {tenant for tenant, cause in turns if cause != "idle"} == {"acme"}
    assert turns["acme", "prefill"] + turns["acme", "decode"] >= 3 - NEAR
    node.close()
