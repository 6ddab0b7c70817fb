"""Whole looks of an operator at a pool: the product's parts from the API's client to the status,
before an API server in memory. The same with a real one: tests/cluster/test_reconcile.py.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest
from kubernetes.aio.client import Configuration

from baton_operator.autoscaling.autoscaler import Autoscaler
from baton_operator.autoscaling.pool_scalers import Scalers
from baton_operator.builders import build_pool
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.controller.pool_task import Incomplete, PoolGone
from baton_operator.controller.reconcile import (
    SECRET_S,
    UNREADY_AGAIN_S,
    PoolParts,
    Reconciler,
)
from baton_operator.controller.status_writer import StatusWriter
from baton_operator.drain.drainer import Drainer
from baton_operator.drain.routers import Routers
from baton_operator.kube.client import Api, Conflict, Unavailable
from baton_operator.kube.kinds import CHILDREN, POD, POOL, key_of, kind_of
from baton_operator.metrics import Metrics
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.index_reader import IndexReader
from baton_operator.status.events import PodEvents
from tests.support.clock import Clock
from tests.support.kubernetes.api_server import ApiServer, Body, api_server
from tests.support.kubernetes.manifests import INSTALLATION, sample, sample_pool
from tests.support.kubernetes.pod_bodies import RUNNING, container, pod

pytestmark = pytest.mark.integration

KEY = PoolKey("serving", "demo")
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


def plain(name: str) -> str:
    """Without its revision, which follows from the random credentials."""
    return re.sub("-[0-9a-f]{10}$", "", name)


class Stage:
    """An operator, and the objects of one pool as the API server has them."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.clock = Clock(10_000.0)
        self.api = Api(Configuration(host=server.url), lambda verb, code: None, 120.0)
        self.start()

    def start(self) -> None:
        """A new operator, which knows what the API server has."""
        self.cache = Cache(lambda key: None, self.clock)
        self.routers = Routers()
        self.reconciler: Reconciler | None = None

    def begin(self) -> Reconciler | None:
        """As a pool's task begins."""
        uid = self.cache.pool_uid(KEY)
        if not uid:
            return None
        clock, api, metrics = self.clock, self.api, Metrics()
        events = PodEvents(KEY, api, clock, lambda after_s: None)
        status = StatusWriter(KEY, api, self.cache, events, lambda: NOW, "test")
        parts = PoolParts(
            index=IndexPoller(KEY, api, IndexReader(clock), lambda: None, clock),
            scalers=Scalers(api, self.cache),
            planner=Autoscaler(KEY, self.cache, metrics, clock, lambda: NOW),
            drainer=Drainer(api, self.cache, self.routers, status.tell, lambda: NOW),
            status=status,
            metrics=metrics,
        )
        return Reconciler(KEY, uid, api, self.cache, parts, INSTALLATION, clock)

    async def reconcile(self) -> float | None:
        """As its task does it: a pool of another uid has a Reconciler of its own."""
        while (reconciler := self.reconciler or self.begin()) is not None:
            self.reconciler = reconciler
            try:
                return await reconciler.reconcile()
            except PoolGone:
                reconciler.end()
                self.reconciler = None
        return None

    async def restart(self) -> None:
        await self.routers.close()
        self.start()

    def watch(self) -> None:
        """The operator sees what there is, as its watches show it."""
        found = {key_of(body): body for body in self.server.objects.values()}
        known = self.cache.pool(KEY)
        if known is not None and not self.named("InferencePool"):
            self.cache.lose_pool(KEY, known["metadata"]["uid"])
        for key, child in self.cache.children(KEY).items():
            if key not in found:
                self.cache.lose_child(KEY, key, child.uid)
        for body in found.values():
            kind = kind_of(body)
            if kind == POOL:
                self.cache.see_pool(body | {"metadata": dict(body["metadata"])}, listed=True)
            elif kind in CHILDREN and kind.watched:
                self.cache.see_child(body, listed=True)

    async def look(self) -> list[str]:
        """One look; the writes to children that changed something, in order."""
        self.watch()
        self.server.writes.clear()
        self.again_s = await self.reconcile()
        return self.writes()

    def writes(self) -> list[str]:
        """To children, as "PATCH deployments/demo-decode"."""
        told = (plain(one) for one in self.server.writes)
        return [one for one in told if " inferencepools/" not in one and " events/" not in one]

    def apply(self, **spec: Any) -> None:
        """The sample's pool, with these fields of its spec."""
        resource = sample("sim")
        resource["spec"] |= spec
        self.server.put(resource)

    def run_pods(self) -> None:
        """Kubernetes' part: each Deployment has the pods that it asks for, and all are ready."""
        for body in self.named("Deployment"):
            wanted, name = body["spec"]["replicas"], body["metadata"]["name"]
            labels = body["spec"]["template"]["metadata"]["labels"]
            for number in range(wanted):
                metadata = {"namespace": KEY.namespace, "labels": labels}
                running = container(RUNNING, ready=True)
                self.server.put(pod(running, name=f"{name}-{number}", **metadata))
            counts = ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas")
            status = dict.fromkeys(counts, wanted)
            seen = {"observedGeneration": body["metadata"]["generation"]}
            self.server.put(body | {"status": status | seen})

    def named(self, kind: str, part: str = "") -> list[Body]:
        """Objects of that kind, with this in their name."""
        return [
            body
            for body in self.server.objects.values()
            if body["kind"] == kind and part in body["metadata"]["name"]
        ]

    def children(self) -> list[Body]:
        """Without pods."""
        objects = self.server.objects.values()
        return [body for body in objects if kind_of(body) in CHILDREN and kind_of(body) != POD]

    def verdict(self, kind: str) -> tuple[str, str]:
        return self.verdicts()[kind]

    def names(self) -> list[str]:
        return sorted(
            f"{body['kind']} {plain(body['metadata']['name'])}" for body in self.children()
        )

    def verdicts(self) -> dict[str, tuple[str, str]]:
        """Status and reason of each condition."""
        [resource] = self.named("InferencePool")
        told = resource["status"]["conditions"]
        return {one["type"]: (one["status"], one["reason"]) for one in told}

    def reasons(self) -> list[str]:
        """Of the events that were told, the oldest first."""
        return [body["reason"] for body in self.named("Event")]


CHILDREN_OF_SIM = [
    f"PATCH {kind_of(body).plural}/{plain(body['metadata']['name'])}"
    for body in build_pool(sample_pool("sim"))
]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """Of a pool that was just made."""
    async with api_server() as server:
        one = Stage(server)
        one.apply()
        yield one
        await one.routers.close()
        await one.api.close()


@pytest.fixture
async def serving(stage: Stage) -> Stage:
    """All is made, and all pods are ready."""
    await stage.look()
    stage.run_pods()
    await stage.look()
    assert stage.verdict("Ready") == ("True", "AllReady")
    return stage


# --- a new pool -----------------------------------------------------------------------------------


async def test_a_new_pool_gets_its_children_in_order_and_then_a_status(stage: Stage) -> None:
    assert await stage.look() == CHILDREN_OF_SIM
    [first, *_] = CHILDREN_OF_SIM
    assert first == "PATCH secrets/demo-auth"
    assert stage.verdict("Applied") == ("True", "AsSpecified")
    assert stage.verdict("Ready") == ("False", "Starting")
    assert stage.again_s == UNREADY_AGAIN_S
    [pool] = stage.named("InferencePool")
    for child in stage.children():
        [owner] = child["metadata"]["ownerReferences"]
        assert owner["uid"] == pool["metadata"]["uid"]


async def test_a_pool_that_is_as_it_shall_be_costs_no_write(serving: Stage) -> None:
    assert serving.reasons() == ["Created", "Ready"]
    await serving.look()
    assert serving.server.writes == []
    assert serving.again_s is None


async def test_a_new_operator_changes_nothing(serving: Stage) -> None:
    await serving.restart()
    await serving.look()
    assert serving.server.writes == []


async def test_a_pool_follows_its_pods(serving: Stage) -> None:
    [node] = serving.named("Pod", "decode")
    serving.server.put(node | {"status": pod(container(RUNNING))["status"]})
    assert await serving.look() == []
    assert serving.verdict("Ready")[0] == serving.verdict("DecodeReady")[0] == "False"
    serving.run_pods()
    assert await serving.look() == []
    assert serving.verdict("Ready")[0] == "True"
    assert serving.reasons() == ["Created", "Ready", "NotReady", "Ready"]


# --- changes, each made to a pool that serves -----------------------------------------------------


Verdicts = dict[str, tuple[str, str]]
AS_BEFORE: Verdicts = {}


class Change(NamedTuple):
    """What somebody does, and which children are applied for it. `verdicts`: of conditions that
    are not as they were."""

    name: str
    act: Callable[[Stage], object]
    writes: tuple[str, ...] = ()
    verdicts: Verdicts = AS_BEFORE


def spec(**fields: Any) -> Callable[[Stage], object]:
    return lambda stage: stage.apply(**fields)


def edit(kind: str, part: str, **fields: Any) -> Callable[[Stage], object]:
    def act(stage: Stage) -> None:
        [body] = stage.named(kind, part)
        stage.server.put({**body, "spec": body["spec"] | fields})

    return act


def delete(kind: str, part: str) -> Callable[[Stage], object]:
    def act(stage: Stage) -> None:
        [body] = stage.named(kind, part)
        stage.server.remove(body)

    return act


def report(stage: Stage) -> None:
    """A controller writes a status that says nothing new."""
    [body] = stage.named("Deployment", "router")
    stage.server.put(body | {"status": {"collisionCount": 1}})


STARTING = ("False", "Starting")
CHANGES = (
    Change("a controller reports", report),
    Change(
        "more routers",
        spec(router={"replicas": 3}),
        ("deployments/demo-router", "poddisruptionbudgets/demo-router"),
        {"Ready": STARTING, "RouterReady": STARTING, "Updated": ("False", "RollingOut")},
    ),
    Change(
        "more nodes",
        spec(decode={"replicas": 3}),
        ("deployments/demo-decode", "poddisruptionbudgets/demo-decode"),
        {"Ready": STARTING, "DecodeReady": STARTING},
    ),
    Change(
        "somebody scales the routers",
        edit("Deployment", "router", replicas=7),
        ("deployments/demo-router",),
        {"Updated": ("False", "RollingOut")},
    ),
    Change(
        "somebody edits a port", edit("Service", "kv-index", ports=[]), ("services/demo-kv-index",)
    ),
    Change("a service goes", delete("Service", "router"), ("services/demo-router",)),
    Change("a policy goes", delete("NetworkPolicy", "decode"), ("networkpolicies/demo-decode",)),
    Change("nodes go", delete("Deployment", "prefill"), ("deployments/demo-prefill",)),
    Change(
        "a pause, and more routers",
        spec(paused=True, router={"replicas": 5}),
        (),
        {"Ready": ("False", "Paused"), "Applied": ("Unknown", "Paused"), "RouterReady": STARTING},
    ),
    Change(
        "a value that is wrong",
        spec(prefill={"replicas": -1}, router={"replicas": 5}),
        (),
        {
            "Ready": ("False", "SpecInvalid"),
            "Valid": ("False", "SpecInvalid"),
            "Applied": ("Unknown", "NothingApplied"),
        },
    ),
)


@pytest.mark.parametrize("change", CHANGES, ids=[change.name for change in CHANGES])
async def test_a_change_takes_these_writes_and_no_more(serving: Stage, change: Change) -> None:
    before = serving.verdicts()
    change.act(serving)
    assert await serving.look() == [f"PATCH {child}" for child in change.writes]
    assert serving.verdicts() == before | change.verdicts
    assert await serving.look() == []


async def test_a_revision_that_never_served_goes_as_soon_as_there_is_another(stage: Stage) -> None:
    await stage.look()
    old = {body["metadata"]["name"] for body in stage.named("Deployment")}
    stage.apply(engine={"kind": "sim", "chunkBlocks": 2})
    for _ in range(3):
        await stage.look()
    new = {body["metadata"]["name"] for body in stage.named("Deployment")}
    assert len(new) == len(old)
    assert {plain(name) for name in new ^ old} == {"demo-prefill", "demo-decode"}


async def test_a_secret_that_is_deleted_is_back_with_its_values_when_it_is_read_again(
    serving: Stage,
) -> None:
    [secret] = serving.named("Secret")
    serving.server.remove(secret)
    assert await serving.look() == []
    serving.clock.advance(SECRET_S)
    assert await serving.look() == ["PATCH secrets/demo-auth"]
    assert serving.named("Secret")[0]["data"] == secret["data"]


async def test_a_pool_that_is_gone_gets_nothing(serving: Stage) -> None:
    for body in serving.children():
        serving.server.remove(body)
    delete("InferencePool", "demo")(serving)
    assert await serving.look() == []
    assert serving.again_s is None


async def test_a_pool_that_no_watch_has_shown_to_be_gone_gets_no_new_children(
    serving: Stage,
) -> None:
    delete("Service", "router")(serving)
    serving.watch()
    delete("InferencePool", "demo")(serving)
    with pytest.raises(Conflict, match="is gone"):
        await serving.reconcile()
    assert serving.named("Service", "router") == []


async def test_a_pool_of_the_same_name_waits_for_the_end_of_the_earlier_ones_children(
    serving: Stage,
) -> None:
    before = serving.children()
    delete("InferencePool", "demo")(serving)
    await serving.look()
    resource = sample("sim")
    resource["metadata"]["uid"] = "another"
    serving.server.put(resource)
    with pytest.raises(Conflict, match="an earlier pool of this name"):
        await serving.look()
    assert serving.writes() == []
    for body in before:  # as Kubernetes does, since their owner is gone
        serving.server.remove(body)
    assert await serving.look() == CHILDREN_OF_SIM


# --- what the API server does not take ------------------------------------------------------------


async def test_no_pod_is_made_without_its_network_policies(stage: Stage) -> None:
    stage.server.refuses = lambda method, path: 422 * ("networkpolicies" in path)
    with pytest.raises(Incomplete, match="1 children refused"):
        await stage.look()
    assert stage.writes() == ["PATCH secrets/demo-auth"]
    assert stage.verdict("Applied")[0] == "False"
    stage.server.refuses = lambda method, path: 0
    assert await stage.look() == CHILDREN_OF_SIM[1:]
    assert stage.verdict("Applied")[0] == "True"


async def test_what_somebody_else_made_is_not_taken_over(stage: Stage) -> None:
    name = {"name": "demo-router", "namespace": KEY.namespace}
    theirs = {"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": {"ports": []}}
    stage.server.put(theirs)
    with pytest.raises(Incomplete):
        await stage.look()
    [service] = stage.named("Service", "router")
    assert service["spec"] == theirs["spec"]
    assert stage.writes() == [one for one in CHILDREN_OF_SIM if one != "PATCH services/demo-router"]
    assert stage.verdict("Applied")[0] == "False"
    stage.server.remove(theirs)
    assert await stage.look() == ["PATCH services/demo-router"]
    assert stage.verdict("Applied")[0] == "True"


async def test_a_status_is_given_to_the_version_it_was_derived_from_only(stage: Stage) -> None:
    def somebody_edits(method: str, path: str) -> int:
        if path.endswith("/status"):
            stage.server.put(sample("sim") | {"spec": {"router": {"replicas": 2}}})
        return 0

    stage.server.refuses = somebody_edits
    with pytest.raises(Conflict):
        await stage.look()
    assert "status" not in stage.named("InferencePool")[0]
    stage.server.refuses = lambda method, path: 0
    await stage.look()
    [pool] = stage.named("InferencePool")
    assert pool["status"]["observedGeneration"] == pool["metadata"]["generation"] == 2
    assert stage.named("Deployment", "router")[0]["spec"]["replicas"] == 2


def away_after(server: ApiServer, more: int) -> Callable[[str, str], int]:
    end = server.requests + more
    return lambda method, path: 503 * (server.requests > end)


async def test_an_operator_that_ends_at_any_request_is_followed_by_one_that_finishes(
    stage: Stage,
) -> None:
    """Every fourth request of a first look is the last one that is answered."""
    await stage.look()
    complete, requests = stage.names(), stage.server.requests
    for last in range(1, requests, 4):
        stage.server.objects.clear()
        stage.apply()
        await stage.restart()
        stage.server.refuses = away_after(stage.server, last)
        with pytest.raises(Unavailable):
            await stage.look()
        stage.server.refuses = lambda method, path: 0
        await stage.restart()
        await stage.look()
        assert stage.names() == complete, f"after {last} requests"
        assert stage.verdict("Applied") == ("True", "AsSpecified")
