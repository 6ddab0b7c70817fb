"""Chats with tools lose neither calls nor reasoning when their request moves: a node is killed or
drained, a prefill node hands over, or an engine preempts. On `sim`; each answer has the ids and the
calls of an undisturbed pool, and the arguments of its calls match their schemas."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from baton_protocol.link import Deltas
from tests.faults.conftest import SHORT_DRAIN, SLOW_DECODE
from tests.support.clients.http import text_of
from tests.support.faults.drains import post_action
from tests.support.faults.tool_runs import (
    ToolRun,
    ToolRuns,
    all_runs,
    one_run_per_request,
    write_model,
)
from tests.support.pools.leaks import settle
from tests.support.pools.processes import SIM, Cluster
from tests.support.wires.wire import Passing
from tests.support.wires.witness import Trap

pytestmark = pytest.mark.integration
EOS = "--sim-eos-every=40"
# Tools make prompts of 933 tokens: with 140 tokens of one answer they fill 68 blocks, with those of
# three answers 88. So a request for three is preempted even if it runs alone.
SCARCE = 72


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = write_model(tmp_path_factory.mktemp("tools"))
    return [*SIM, EOS, "--model", str(folder)]


@pytest.fixture(scope="module")
def undisturbed(flags: list[str]) -> Iterator[Cluster]:
    with Cluster(0, 1, flags=[*flags, "--kv-blocks=4000"], store=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool(flags: list[str]) -> Iterator[Cluster]:
    with Cluster(
        *(1, 2),
        flags=[*flags, "--kv-blocks=4000"],
        decode_flags=[*SLOW_DECODE, SHORT_DRAIN],
        router_flags=["--handoff=always"],
    ) as cluster:
        yield cluster


LONG = [run for run in all_runs() if run not in one_run_per_request()]


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(one_run_per_request(), id="selected"),
        pytest.param(LONG[::2], id="long 0", marks=pytest.mark.long),
        pytest.param(LONG[1::2], id="long 1", marks=pytest.mark.long),
    ],
)
def test_a_call_continues_when_its_node_dies(
    runs: Sequence[ToolRun], pool: Cluster, undisturbed: Cluster
) -> None:
    killed = ToolRuns(pool, undisturbed, seed=f"{len(runs)}")
    try:
        killed.run(runs)
    finally:
        pool.repair()
    assert killed.counts.kills > 0
    assert killed.calls > 0
    assert killed.counts.ended > 0


def test_a_call_continues_after_a_hand_off(pool: Cluster, undisturbed: Cluster) -> None:
    runs, handed_off = one_run_per_request(), ToolRuns(pool, undisturbed, seed="hand-off")
    pool.witness.forget()
    assert handed_off.execute(runs) == set()
    for run in runs:
        ids = handed_off.prompt_ids(handed_off.body(run, 0))
        roles = [placed.role for placed in pool.witness.placements(ids)]
        assert sorted(roles) == ["decode", "prefill"], run
    assert handed_off.calls > 0


def test_a_call_continues_when_its_node_is_drained(pool: Cluster, undisturbed: Cluster) -> None:
    runs, drained = one_run_per_request(), ToolRuns(pool, undisturbed, seed="drain")
    pool.witness.forget()

    def drain() -> None:
        post_action(pool, "decode-0", "drain", deadline_s=0.0, reason="test")

    def is_delta(passing: Passing) -> bool:
        return passing.node == "decode-0" and isinstance(passing.frame, Deltas)

    draining = threading.Thread(target=drain)
    pool.witness.set_trap(Trap(is_delta, draining.start, after=True))
    try:
        moved = drained.execute(runs, turn=1)
    finally:
        draining.join()
        post_action(pool, "decode-0", "resume")
        settle(pool)
    assert moved
    assert drained.calls > 0


def test_a_call_continues_after_a_preemption(flags: list[str], undisturbed: Cluster) -> None:
    """A node with little memory preempts answers and computes them again."""
    runs = one_run_per_request()
    with Cluster(0, 1, flags=[*flags, f"--kv-blocks={SCARCE}"], store=False) as small:
        preempted = ToolRuns(small, undisturbed, seed="preemption")
        for run in runs:
            if run.n == 3:
                preempted.execute([run], turn=2)
        [node] = small.nodes.values()
        page = text_of(f"http://127.0.0.1:{node.port}", "/metrics")
        preempted.execute(runs, turn=3)
    [line] = [each for each in page.splitlines() if each.startswith("baton_preemptions_total")]
    assert float(line.split()[-1]) > 0
    assert preempted.calls > 0
