"""The planner scales a pool in a real API server, by reports in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from baton_protocol.store import ROLES
from tests.cluster.fake_autoscaled_pool import Clients, FakeAutoscaledPool, running_clients
from tests.cluster.fake_pool import FakeRouter, frozen_index
from tests.cluster.fault_proxy import RESET, FaultProxy
from tests.cluster.operators import Operator, Pool, print_log, until

# Fake nodes report a prefill rate of 10,000 tokens per second.
HIGH_LOAD = 25_000.0


@pytest.fixture
def fake_pool(
    request: pytest.FixtureRequest, operator: Operator, pool: Pool, index: int, router: FakeRouter
) -> Iterator[FakeAutoscaledPool]:
    """A started pool. The fixture's parameter overrides fields of `autoscaling`."""
    one = FakeAutoscaledPool(pool, f"redis://127.0.0.1:{index}", router)
    one.start(**getattr(request, "param", {}))
    yield one
    print_log(operator)


@pytest.fixture
def clients(fake_pool: FakeAutoscaledPool, index: int) -> Iterator[Clients]:
    with running_clients(fake_pool.pool, f"redis://127.0.0.1:{index}") as one:
        yield one


def metrics(operator: Operator) -> str:
    with urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics") as answer:
        page: str = answer.read().decode()
        return page


def decisions(operator: Operator, pool: Pool) -> float:
    """How many decisions the planner has taken for the pool."""
    prefix = f'baton_operator_decisions_total{{pool="{pool.namespace}/pool",'
    lines = (line for line in metrics(operator).splitlines() if line.startswith(prefix))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_load_of_prompts_adds_prefill_nodes_and_its_end_removes_them(
    fake_pool: FakeAutoscaledPool, clients: Clients, operator: Operator
) -> None:
    clients.uncached = HIGH_LOAD
    until(lambda: fake_pool.replica_counts() == (4, 1), "more prefill nodes")
    decision = fake_pool.decision()
    assert (decision["desiredPrefill"], decision["desiredDecode"], decision["mode"]) == (
        4,
        1,
        "auto",
    )
    assert "prefill_needed" in decision["numbers"]
    until(lambda: any("prefill 1 -> " in one for one in fake_pool.scale_events()), "its event")
    page, pool = metrics(operator), f'pool="{fake_pool.pool.namespace}/pool"'
    assert f'baton_operator_desired_nodes{{{pool},role="prefill"}} 4.0' in page
    assert f"baton_operator_decisions_total{{{pool},reason=" in page
    until(lambda: fake_pool.pool.body()["status"]["prefill"]["desired"] == 4, "the status")
    clients.uncached = 0.0
    until(lambda: fake_pool.replica_counts() == (1, 1), "fewer prefill nodes")


@pytest.mark.parametrize("fake_pool", [{"mode": "advise"}], indirect=True)
def test_mode_advise_reports_decisions_and_scales_nothing(
    fake_pool: FakeAutoscaledPool, clients: Clients
) -> None:
    clients.uncached = HIGH_LOAD
    until(lambda: fake_pool.decision().get("desiredPrefill", 0) > 1, "the advice")
    assert fake_pool.decision()["mode"] == "advise"
    assert fake_pool.replica_counts() == (1, 1)
    assert not fake_pool.scale_events()


def test_without_router_reports_nothing_is_scaled_and_the_reason_is_demand_stale(
    fake_pool: FakeAutoscaledPool, clients: Clients
) -> None:
    clients.uncached = HIGH_LOAD
    until(lambda: fake_pool.replica_counts() == (4, 1), "more prefill nodes")
    clients.silent = True
    until(lambda: fake_pool.decision()["reason"] == "DemandStale", "reason DemandStale")
    assert fake_pool.replica_counts() == (4, 1)
    clients.silent, clients.uncached = False, 0.0
    until(lambda: fake_pool.replica_counts()[0] < 4, "fewer prefill nodes")


def test_without_the_index_nothing_is_scaled_and_the_reason_is_demand_stale(
    fake_pool: FakeAutoscaledPool, clients: Clients, index: int
) -> None:
    clients.uncached = HIGH_LOAD
    until(lambda: fake_pool.replica_counts() == (4, 1), "more prefill nodes")
    with frozen_index(index):
        until(lambda: fake_pool.decision()["reason"] == "DemandStale", "reason DemandStale")
        assert fake_pool.replica_counts() == (4, 1)


@pytest.mark.parametrize("fake_pool", [{"scaleToZeroAfterSeconds": 10}], indirect=True)
def test_an_idle_pool_scales_to_zero_until_a_request_is_held(
    fake_pool: FakeAutoscaledPool, clients: Clients
) -> None:
    args = fake_pool.pool.child("Deployment", "router")["spec"]["template"]["spec"]["containers"][0]
    assert "--wake-wait=900" in args["args"]
    clients.uncached = 1000.0
    fake_pool.wait_demand_known()
    clients.uncached, clients.idle_s = 0.0, 11.0
    until(lambda: fake_pool.decision()["desiredDecode"] == 0, "the decision")
    until(lambda: len({*fake_pool.router.targets("drain")}) == 2, "both drains")
    for role in ROLES:
        for node in fake_pool.pods(role):
            fake_pool.report(node, state="draining")
    until(lambda: fake_pool.replica_counts() == (0, 0), "no nodes")
    until(lambda: fake_pool.pool.condition("Serving")["reason"] == "Asleep", "condition Serving")
    assert fake_pool.pool.condition("Ready")["status"] == "True"
    until(lambda: fake_pool.decision()["reason"] == "Asleep", "the sleep")
    clients.held, clients.idle_s = 1, 0.0
    until(lambda: fake_pool.replica_counts() == (1, 1), "both nodes")
    until(lambda: fake_pool.pool.condition("Serving")["reason"] == "Waking", "condition Serving")
    clients.held = 0
    until(lambda: any("prefill 0 -> 1" in one for one in fake_pool.scale_events()), "its event")


@pytest.mark.parametrize("fake_pool", [{"sleepAfterSeconds": 10}], indirect=True)
def test_a_pool_whose_engines_sleep_keeps_its_nodes_and_says_so(
    fake_pool: FakeAutoscaledPool, clients: Clients
) -> None:
    args = fake_pool.pool.child("Deployment", "router")["spec"]["template"]["spec"]["containers"][0]
    assert {"--wake-wait=900", "--sleep-after=10"} <= {*args["args"]}
    clients.uncached = 1000.0
    fake_pool.wait_demand_known()
    clients.uncached, clients.idle_s = 0.0, 11.0
    nodes = [node for role in ROLES for node in fake_pool.pods(role)]
    for node in nodes:
        fake_pool.report(node, state="draining", wakes=True)
    until(lambda: fake_pool.decision()["reason"] == "NodesAsleep", "the sleep")
    assert fake_pool.decision()["message"].startswith("idle for ")
    until(lambda: fake_pool.pool.condition("Serving")["reason"] == "NodesAsleep", "Serving")
    assert fake_pool.pool.condition("Ready")["status"] == "True"
    assert fake_pool.replica_counts() == (1, 1)
    for node in nodes:
        fake_pool.report(node)
    until(lambda: fake_pool.pool.condition("Serving")["reason"] == "Answering", "Serving")
    assert not fake_pool.router.targets("drain")


def test_scale_to_zero_starts_only_once_routers_can_hold_requests(
    fake_pool: FakeAutoscaledPool, clients: Clients, operator: Operator
) -> None:
    clients.uncached = 1000.0
    fake_pool.wait_demand_known()
    clients.uncached, clients.idle_s = 0.0, 30.0
    [old] = fake_pool.pods("router")
    fake_pool.pool.patch({"autoscaling": {"scaleToZeroAfterSeconds": 10}})
    until(lambda: len(fake_pool.pods("router")) == 2, "the new router's pod")
    before = decisions(operator, fake_pool.pool)
    until(lambda: decisions(operator, fake_pool.pool) >= before + 3, "more decisions")
    assert fake_pool.replica_counts() == (1, 1)
    assert not fake_pool.router.targets("drain")
    [new] = {*fake_pool.pods("router")} - {old}
    fake_pool.set_pod_status(new, podIP=fake_pool.router.address)
    until(lambda: len({*fake_pool.router.targets("drain")}) == 2, "both drains")
    assert fake_pool.pods("router") == [new]


STATUS_PATH, NODES_PATH = "/inferencepools/pool/status", "/deployments/pool-prefill"


@pytest.mark.timeout(600)  # it starts 4 operators
def test_after_a_kill_at_each_step_the_next_operator_scales_up(
    fake_pool: FakeAutoscaledPool, clients: Clients, proxy: FaultProxy, operator: Operator
) -> None:
    def load() -> None:
        clients.uncached = HIGH_LOAD

    fake_pool.wait_demand_known()
    # The decision was not stored.
    operator.kill_at(proxy, RESET, load, path=STATUS_PATH)
    assert fake_pool.replica_counts() == (1, 1)
    assert fake_pool.decision()["desiredPrefill"] == 1
    clients.uncached, clients.silent = 0.0, True
    operator.start()
    unknown = ("DemandUnknown", "DemandStale")
    until(lambda: fake_pool.decision()["reason"] in unknown, "the first decision after the restart")
    clients.silent = False
    fake_pool.wait_demand_known()
    # The decision was stored, but not applied.
    operator.kill_at(proxy, RESET, load, path=NODES_PATH)
    wanted = fake_pool.decision()["desiredPrefill"]
    assert wanted > 1
    assert fake_pool.replica_counts() == (1, 1)
    # Without reports, the next operator must act on the stored decision.
    clients.silent = True
    operator.start()
    until(lambda: fake_pool.replica_counts() == (wanted, 1), "the nodes of the stored decision")
