"""The planner at work on a pool in a real API server, with reports in a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.request import urlopen

import pytest

from baton_protocol.store import ROLES
from tests.cluster.autoscaling_stage import Clients, Scaled, clients_of
from tests.cluster.fault_proxy import RESET, FaultProxy
from tests.cluster.operators import Operator, Pool, tell, until
from tests.cluster.stage import Router, silent_index

# A node computes 10,000 prompt tokens per second, by its own word.
MANY = 25_000.0


@pytest.fixture
def stage(
    request: pytest.FixtureRequest, operator: Operator, pool: Pool, index: int, router: Router
) -> Iterator[Scaled]:
    """Its parameter is laid over `autoscaling`."""
    one = Scaled(pool, f"redis://127.0.0.1:{index}", router)
    one.begin(**getattr(request, "param", {}))
    yield one
    tell(operator)


@pytest.fixture
def clients(stage: Scaled, index: int) -> Iterator[Clients]:
    with clients_of(stage.pool, f"redis://127.0.0.1:{index}") as one:
        yield one


def metrics(operator: Operator) -> str:
    with urlopen(f"http://127.0.0.1:{operator.metrics_port}/metrics") as answer:
        page: str = answer.read().decode()
        return page


def decisions(operator: Operator, pool: Pool) -> float:
    """How often the planner has decided for it."""
    begin = f'baton_operator_decisions_total{{pool="{pool.namespace}/pool",'
    lines = (line for line in metrics(operator).splitlines() if line.startswith(begin))
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_prompts_bring_prefill_nodes_and_when_they_end_these_go(
    stage: Scaled, clients: Clients, operator: Operator
) -> None:
    clients.uncached = MANY
    until(lambda: stage.counts() == (4, 1), "more prefill nodes")
    said = stage.said()
    assert (said["desiredPrefill"], said["desiredDecode"], said["mode"]) == (4, 1, "auto")
    assert "prefill_needed" in said["numbers"]
    until(lambda: any("prefill 1 -> " in one for one in stage.moves()), "its event")
    page, pool = metrics(operator), f'pool="{stage.pool.namespace}/pool"'
    assert f'baton_operator_desired_nodes{{{pool},role="prefill"}} 4.0' in page
    assert f"baton_operator_decisions_total{{{pool},reason=" in page
    until(lambda: stage.pool.body()["status"]["prefill"]["desired"] == 4, "the status")
    clients.uncached = 0.0
    until(lambda: stage.counts() == (1, 1), "fewer prefill nodes")


@pytest.mark.parametrize("stage", [{"mode": "advise"}], indirect=True)
def test_an_adviser_says_what_it_would_do_and_does_nothing(stage: Scaled, clients: Clients) -> None:
    clients.uncached = MANY
    until(lambda: stage.said().get("desiredPrefill", 0) > 1, "the advice")
    assert stage.said()["mode"] == "advise"
    assert stage.counts() == (1, 1)
    assert not stage.moves()


def test_while_routers_are_silent_nothing_changes_and_it_is_said(
    stage: Scaled, clients: Clients
) -> None:
    clients.uncached = MANY
    until(lambda: stage.counts() == (4, 1), "more prefill nodes")
    clients.silent = True
    until(lambda: stage.said()["reason"] == "DemandStale", "what is missing")
    assert stage.counts() == (4, 1)
    clients.silent, clients.uncached = False, 0.0
    until(lambda: stage.counts()[0] < 4, "fewer prefill nodes")


def test_while_the_index_is_away_nothing_changes_and_it_is_said(
    stage: Scaled, clients: Clients, index: int
) -> None:
    clients.uncached = MANY
    until(lambda: stage.counts() == (4, 1), "more prefill nodes")
    with silent_index(index):
        until(lambda: stage.said()["reason"] == "DemandStale", "what is missing")
        assert stage.counts() == (4, 1)


@pytest.mark.parametrize("stage", [{"scaleToZeroAfterSeconds": 10}], indirect=True)
def test_a_pool_without_clients_sleeps_until_a_request_is_held(
    stage: Scaled, clients: Clients
) -> None:
    args = stage.pool.child("Deployment", "router")["spec"]["template"]["spec"]["containers"][0]
    assert "--wake-wait=900" in args["args"]
    clients.uncached = 1000.0
    stage.until_known()
    clients.uncached, clients.idle_s = 0.0, 11.0
    until(lambda: stage.said()["desiredDecode"] == 0, "the decision")
    until(lambda: len({*stage.router.acts("drain")}) == 2, "both drains")
    for role in ROLES:
        for node in stage.pods(role):
            stage.report(node, state="draining")
    until(lambda: stage.counts() == (0, 0), "no nodes")
    until(lambda: stage.pool.condition("Serving")["reason"] == "Asleep", "condition Serving")
    assert stage.pool.condition("Ready")["status"] == "True"
    until(lambda: stage.said()["reason"] == "Asleep", "the sleep")
    clients.held, clients.idle_s = 1, 0.0
    until(lambda: stage.counts() == (1, 1), "both nodes")
    until(lambda: stage.pool.condition("Serving")["reason"] == "Waking", "condition Serving")
    clients.held = 0
    until(lambda: any("prefill 0 -> 1" in one for one in stage.moves()), "its event")


def test_a_pool_that_may_sleep_from_now_on_first_gets_routers_that_hold_requests(
    stage: Scaled, clients: Clients, operator: Operator
) -> None:
    clients.uncached = 1000.0
    stage.until_known()
    clients.uncached, clients.idle_s = 0.0, 30.0
    [old] = stage.pods("router")
    stage.pool.patch({"autoscaling": {"scaleToZeroAfterSeconds": 10}})
    until(lambda: len(stage.pods("router")) == 2, "the new router's pod")
    before = decisions(operator, stage.pool)
    until(lambda: decisions(operator, stage.pool) >= before + 3, "more decisions")
    assert stage.counts() == (1, 1)
    assert not stage.router.acts("drain")
    [new] = {*stage.pods("router")} - {old}
    stage.kubelet(new, podIP=stage.router.address)
    until(lambda: len({*stage.router.acts("drain")}) == 2, "both drains")
    assert stage.pods("router") == [new]


STATUS, NODES = "/inferencepools/pool/status", "/deployments/pool-prefill"


@pytest.mark.timeout(600)  # it starts 4 operators
def test_an_operator_killed_at_each_step_is_followed_by_one_that_scales_up(
    stage: Scaled, clients: Clients, proxy: FaultProxy, operator: Operator
) -> None:
    def load() -> None:
        clients.uncached = MANY

    stage.until_known()
    # Decided, and nobody knows it.
    operator.kill_at(proxy, RESET, load, path=STATUS)
    assert stage.counts() == (1, 1)
    assert stage.said()["desiredPrefill"] == 1
    clients.uncached, clients.silent = 0.0, True
    operator.start()
    unknown = ("DemandUnknown", "DemandStale")
    until(lambda: stage.said()["reason"] in unknown, "its first look")
    clients.silent = False
    stage.until_known()
    # Decided and said, and not done.
    operator.kill_at(proxy, RESET, load, path=NODES)
    wanted = stage.said()["desiredPrefill"]
    assert wanted > 1
    assert stage.counts() == (1, 1)
    # What the next one hears does not make it go there.
    clients.silent = True
    operator.start()
    until(lambda: stage.counts() == (wanted, 1), "the nodes that were decided")
