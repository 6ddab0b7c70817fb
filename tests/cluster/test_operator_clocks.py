"""Operators with wrong clocks end no drain early.

These are the operator's cells of the matrix in tests/faults/test_clocks.py. During a roll-out, an
old node has an hour for a request that no new node can take over. The operator that marked the node
dies; its successor's clock differs by two hours. Both clocks are wrong, and the timestamps of
kubelets are from another year.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.fake_pool import OTHER_FINGERPRINT, FakePool
from tests.cluster.fault_proxy import FaultProxy
from tests.cluster.operators import Operator, until
from tests.support.wrong_clock import HOUR_S, WrongClock


@pytest.fixture
def clock(tmp_path: Path) -> WrongClock:
    return WrongClock(tmp_path)


@pytest.fixture
def operator(proxy: FaultProxy, tmp_path: Path, clock: WrongClock, namespace: str) -> Operator:
    """An operator whose lease is in the pool's namespace."""
    folder = tmp_path / "operator"
    folder.mkdir()
    arguments = (proxy.kubeconfig, folder, "--leader-elect")
    return Operator(*arguments, system=namespace, environment=clock.environment)


# In both cases the clock is set forward and back.
@pytest.mark.parametrize("ahead_s", [HOUR_S, pytest.param(-HOUR_S, marks=pytest.mark.long)])
def test_a_successor_with_another_clock_ends_no_drain_early(
    operator: Operator, clock: WrongClock, fake_pool: FakePool, ahead_s: int
) -> None:
    clock.set(-ahead_s)
    with operator:
        old = fake_pool.start(rollout={"maxDrainSeconds": HOUR_S})
        [decode], [prefill] = (
            fake_pool.node_pods(old, "decode"),
            fake_pool.node_pods(old, "prefill"),
        )
        fake_pool.report(decode, requests=1)
        new = fake_pool.roll()
        fake_pool.wait_pods(new, "prefill")
        fake_pool.wait_pods(new, "decode")
        fake_pool.make_ready(new, fingerprint=OTHER_FINGERPRINT)
        fake_pool.finish_drains(prefill)
        until(lambda: fake_pool.drain_request(decode), "the drain")
        fake_pool.report(decode, requests=1, state="draining")
        since = fake_pool.drain_annotations(decode)["baton.dev/drain-since"]
        operator.kill()

        clock.set(ahead_s)
        operator.start()
        fake_pool.wait_calls("drain", 6)
        assert fake_pool.drain_annotations(decode)["baton.dev/drain-since"] == since
        assert fake_pool.node_pods(old, "decode") == [decode]
        assert fake_pool.deployments(old)["decode"] == 1

        clock.set(-ahead_s)  # the clock changes while the operator runs
        fake_pool.wait_calls("drain", 6)
        assert fake_pool.node_pods(old, "decode") == [decode]

        fake_pool.report(decode, state="draining")
        until(lambda: fake_pool.is_gone(old), "the end of the roll-out")
