"""Operators with another time of day let no node go early.

The operator's cells of the matrix in tests/faults/test_clocks.py. A roll-out's old node has a
request that no new node can take over, and an hour for it. The operator that marked the node dies;
the next one's clock is two hours off against that of the mark. Neither is right, and what kubelets
have stamped is of yet another year.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.operators import Operator, until
from tests.cluster.stage import OTHER, Stage
from tests.support.wrong_clock import HOUR_S, WrongClock


@pytest.fixture
def clock(tmp_path: Path) -> WrongClock:
    return WrongClock(tmp_path)


@pytest.fixture
def operator(proxy: FaultProxy, tmp_path: Path, clock: WrongClock, namespace: str) -> Operator:
    """Its lease lies beside the pool."""
    folder = tmp_path / "operator"
    folder.mkdir()
    words = (proxy.kubeconfig, folder, "--leader-elect")
    return Operator(*words, system=namespace, environment=clock.environment)


# Either way the clock goes to and fro.
@pytest.mark.parametrize("ahead_s", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.long)])
def test_an_operator_after_one_with_another_clock_ends_no_drain_early(
    operator: Operator, clock: WrongClock, stage: Stage, ahead_s: int
) -> None:
    clock.set(-ahead_s)
    with operator:
        old = stage.begin(rollout={"maxDrainSeconds": HOUR_S})
        [decode], [prefill] = stage.of(old, "decode"), stage.of(old, "prefill")
        stage.report(decode, requests=1)
        new = stage.roll()
        stage.made(new, "prefill")
        stage.made(new, "decode")
        stage.serve(new, fingerprint=OTHER)
        stage.drained(prefill)
        until(lambda: stage.words(decode), "the drain")
        stage.report(decode, requests=1, state="draining")
        since = stage.notes(decode)["baton.dev/drain-since"]
        operator.kill()

        clock.set(ahead_s)
        operator.start()
        stage.looks("drain", 6)
        assert stage.notes(decode)["baton.dev/drain-since"] == since
        assert stage.of(old, "decode") == [decode]
        assert stage.deployments(old)["decode"] == 1

        clock.set(-ahead_s)  # a step while it runs
        stage.looks("drain", 6)
        assert stage.of(old, "decode") == [decode]

        stage.report(decode, state="draining")
        until(lambda: stage.is_over(old), "the end of the roll-out")
