"""The laws of the reconcile, from the API client to the status, with an API server in memory.

tests/cluster/test_reconcile.py has what only a real API server shows.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from kubernetes.aio.client import Configuration

from baton_operator.autoscaling.autoscaler import Autoscaler
from baton_operator.autoscaling.pool_scalers import Scalers
from baton_operator.builders import build_pool
from baton_operator.controller.applier import Applier
from baton_operator.controller.index_poller import IndexPoller
from baton_operator.controller.ownership import GONE_S, HEARTBEAT_S, ROUNDING_S, Ownership
from baton_operator.controller.pool_secret import SECRET_S, PoolSecret
from baton_operator.controller.reconcile import (
    UNREADY_AGAIN_S,
    Incomplete,
    PoolGone,
    PoolParts,
    Reconciler,
)
from baton_operator.controller.status_writer import StatusWriter
from baton_operator.drain.drainer import Drainer
from baton_operator.drain.routers import Routers
from baton_operator.kube.client import Api, ApiUnavailable, Conflict
from baton_operator.kube.kinds import CHILDREN, POD, POOL, key_of, kind_of
from baton_operator.metrics import Metrics
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.index_reader import IndexReader
from baton_operator.status.pod_events import PodEvents
from tests.support.clock import Clock
from tests.support.kubernetes.api_server import ApiServer, Body, api_server
from tests.support.kubernetes.manifests import INSTALLATION, sample, sample_pool
from tests.support.kubernetes.pod_bodies import RUNNING, container, pod

pytestmark = pytest.mark.integration

KEY = PoolKey("serving", "demo")
NOW = datetime(2026, 5, 4, 12, 0, 0, tzinfo=UTC)


def plain(name: str) -> str:
    """Return the name without its revision, which depends on the random credentials."""
    return re.sub("-[0-9a-f]{10}$", "", name)


class Harness:
    """An operator, and the objects of one pool as the API server has them."""

    def __init__(self, server: ApiServer, name: str = "baton-system/baton-operator") -> None:
        self.server = server
        self.name = name
        self.clock = Clock(10_000.0)
        self.now = NOW
        self.api = Api(Configuration(host=server.url), lambda verb, code: None, 120.0)
        self.start()

    def start(self) -> None:
        """Start a new operator, which knows nothing but the API server's objects."""
        self.cache = Cache(lambda key: None, self.clock)
        self.routers = Routers()
        self.reconciler: Reconciler | None = None

    def new_reconciler(self) -> Reconciler | None:
        """Return a new Reconciler, as a pool's task makes it when it starts."""
        uid = self.cache.pool_uid(KEY)
        if not uid:
            return None
        clock, api, metrics = self.clock, self.api, Metrics()
        events = PodEvents(KEY, api, clock, lambda after_s: None)
        status = StatusWriter(KEY, api, self.cache, events, lambda: self.now, "test")
        secret = PoolSecret(KEY, uid, api, clock)
        parts = PoolParts(
            index=IndexPoller(KEY, api, IndexReader(clock), lambda: None, clock),
            scalers=Scalers(api, self.cache),
            planner=Autoscaler(KEY, self.cache, metrics, clock, lambda: self.now),
            drainer=Drainer(api, self.cache, self.routers, status.post_event, lambda: self.now),
            status=status,
            secret=secret,
            applier=Applier(KEY, uid, api, self.cache, secret, metrics),
            ownership=Ownership(self.name, clock),
        )
        return Reconciler(KEY, uid, self.cache, parts, INSTALLATION)

    async def reconcile(self) -> float | None:
        """Reconcile as a pool's task does: a pool with another uid gets its own Reconciler."""
        while (reconciler := self.reconciler or self.new_reconciler()) is not None:
            self.reconciler = reconciler
            try:
                return await reconciler.reconcile()
            except PoolGone:
                reconciler.forget_pool()
                self.reconciler = None
        return None

    async def restart(self) -> None:
        await self.routers.close()
        self.start()

    def watch(self) -> None:
        """Show the operator all objects, as its watches would."""
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
        """Reconcile once; return the writes that changed children, in order."""
        self.watch()
        self.server.writes.clear()
        self.again_s = await self.reconcile()
        return self.writes()

    def writes(self) -> list[str]:
        """Return the writes to children, such as "PATCH deployments/demo-decode"."""
        writes = (plain(write) for write in self.server.writes)
        return [one for one in writes if " inferencepools/" not in one and " events/" not in one]

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.now += timedelta(seconds=seconds)

    def apply(self, **spec: Any) -> None:
        """Write the sample's pool with these fields in its spec."""
        resource = sample("sim")
        resource["spec"] |= spec
        self.server.put(resource)

    def run_pods(self) -> None:
        """Do the part of Kubernetes: give each Deployment its pods, all of them ready."""
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
        """Return the objects of this kind with `part` in their name."""
        return [
            body
            for body in self.server.objects.values()
            if body["kind"] == kind and part in body["metadata"]["name"]
        ]

    def children(self) -> list[Body]:
        """Return the pool's children, without pods."""
        objects = self.server.objects.values()
        return [body for body in objects if kind_of(body) in CHILDREN and kind_of(body) != POD]

    def verdict(self, kind: str) -> tuple[str, str]:
        return self.verdicts()[kind]

    def names(self) -> list[str]:
        return sorted(
            f"{body['kind']} {plain(body['metadata']['name'])}" for body in self.children()
        )

    def verdicts(self) -> dict[str, tuple[str, str]]:
        """Return the status and reason of each condition."""
        [resource] = self.named("InferencePool")
        conditions = resource["status"]["conditions"]
        return {
            condition["type"]: (condition["status"], condition["reason"])
            for condition in conditions
        }

    def reasons(self) -> list[str]:
        """Return the reasons of the events, the oldest first."""
        return [body["reason"] for body in self.named("Event")]


CHILDREN_OF_SIM = [
    f"PATCH {kind_of(body).plural}/{plain(body['metadata']['name'])}"
    for body in build_pool(sample_pool("sim"))
]


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """An operator with a pool that was just created."""
    async with api_server() as server:
        one = Harness(server)
        one.apply()
        yield one
        await one.routers.close()
        await one.api.close()


@pytest.fixture
async def serving(harness: Harness) -> Harness:
    """An operator with a pool whose children exist and whose pods are ready."""
    await harness.look()
    harness.run_pods()
    await harness.look()
    assert harness.verdict("Ready") == ("True", "AllReady")
    return harness


# --- a new pool -----------------------------------------------------------------------------------


async def test_a_new_pool_gets_its_children_in_order_and_then_a_status(harness: Harness) -> None:
    assert await harness.look() == CHILDREN_OF_SIM
    [first, *_] = CHILDREN_OF_SIM
    assert first == "PATCH secrets/demo-auth"
    assert harness.verdict("Applied") == ("True", "AsSpecified")
    assert harness.verdict("Ready") == ("False", "Starting")
    assert harness.again_s == UNREADY_AGAIN_S
    [pool] = harness.named("InferencePool")
    for child in harness.children():
        [owner] = child["metadata"]["ownerReferences"]
        assert owner["uid"] == pool["metadata"]["uid"]


async def test_an_unchanged_pool_causes_no_write(serving: Harness) -> None:
    assert serving.reasons() == ["Created", "Ready"]
    await serving.look()
    assert serving.server.writes == []
    assert serving.again_s == HEARTBEAT_S + ROUNDING_S


async def test_a_new_operator_changes_nothing(serving: Harness) -> None:
    await serving.restart()
    await serving.look()
    assert serving.server.writes == []


async def test_the_status_follows_the_pods(serving: Harness) -> None:
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
    """A change in the cluster, the children that are applied for it, and the `verdicts` of the
    conditions that change."""

    name: str
    act: Callable[[Harness], object]
    writes: tuple[str, ...] = ()
    verdicts: Verdicts = AS_BEFORE


def spec(**fields: Any) -> Callable[[Harness], object]:
    return lambda harness: harness.apply(**fields)


def edit(kind: str, part: str, **fields: Any) -> Callable[[Harness], object]:
    def act(harness: Harness) -> None:
        [body] = harness.named(kind, part)
        harness.server.put({**body, "spec": body["spec"] | fields})

    return act


def delete(kind: str, part: str) -> Callable[[Harness], object]:
    def act(harness: Harness) -> None:
        [body] = harness.named(kind, part)
        harness.server.remove(body)

    return act


def report(harness: Harness) -> None:
    """Write a status as a controller would, without a change that matters to the operator."""
    [body] = harness.named("Deployment", "router")
    harness.server.put(body | {"status": {"collisionCount": 1}})


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
        "another client scales the routers",
        edit("Deployment", "router", replicas=7),
        ("deployments/demo-router",),
        {"Updated": ("False", "RollingOut")},
    ),
    Change("a service is deleted", delete("Service", "router"), ("services/demo-router",)),
    Change(
        "a pause, and more routers",
        spec(paused=True, router={"replicas": 5}),
        (),
        {"Ready": ("False", "Paused"), "Applied": ("Unknown", "Paused"), "RouterReady": STARTING},
    ),
    Change(
        "an invalid value",
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
async def test_a_change_causes_only_these_writes(serving: Harness, change: Change) -> None:
    before = serving.verdicts()
    change.act(serving)
    assert await serving.look() == [f"PATCH {child}" for child in change.writes]
    assert serving.verdicts() == before | change.verdicts
    assert await serving.look() == []


async def test_a_paused_pool_is_brought_up_to_date_when_it_is_resumed(serving: Harness) -> None:
    serving.apply(paused=True, router={"replicas": 5})
    delete("Service", "router")(serving)
    assert await serving.look() == []
    [pool] = serving.named("InferencePool")
    assert pool["status"]["observedGeneration"] == pool["metadata"]["generation"]
    serving.apply(paused=False)
    assert sorted(await serving.look()) == [
        "PATCH deployments/demo-router",
        "PATCH poddisruptionbudgets/demo-router",
        "PATCH services/demo-router",
    ]


async def test_an_invalid_spec_is_forgotten_once_it_is_corrected(serving: Harness) -> None:
    serving.apply(prefill={"replicas": -1}, router={"replicas": 2})
    assert await serving.look() == []
    serving.apply(prefill={"replicas": 1})
    assert "PATCH deployments/demo-router" in await serving.look()
    assert serving.verdict("Valid")[0] == "True"


async def test_a_revision_that_never_served_is_deleted_when_there_is_a_newer_one(
    harness: Harness,
) -> None:
    await harness.look()
    old = {body["metadata"]["name"] for body in harness.named("Deployment")}
    harness.apply(engine={"kind": "sim", "chunkBlocks": 2})
    for _ in range(3):
        await harness.look()
    new = {body["metadata"]["name"] for body in harness.named("Deployment")}
    assert len(new) == len(old)
    assert {plain(name) for name in new ^ old} == {"demo-prefill", "demo-decode"}


async def test_a_deleted_secret_is_restored_with_its_values_at_the_next_check(
    serving: Harness,
) -> None:
    [secret] = serving.named("Secret")
    serving.server.remove(secret)
    assert await serving.look() == []
    serving.clock.advance(SECRET_S)
    assert await serving.look() == ["PATCH secrets/demo-auth"]
    assert serving.named("Secret")[0]["data"] == secret["data"]


async def test_a_deleted_pool_gets_no_children(serving: Harness) -> None:
    for body in serving.children():
        serving.server.remove(body)
    delete("InferencePool", "demo")(serving)
    assert await serving.look() == []
    assert serving.again_s is None


async def test_a_deleted_pool_gets_no_children_before_the_watch_shows_the_deletion(
    serving: Harness,
) -> None:
    delete("Service", "router")(serving)
    serving.watch()
    delete("InferencePool", "demo")(serving)
    with pytest.raises(Conflict, match="is gone"):
        await serving.reconcile()
    assert serving.named("Service", "router") == []


async def test_a_new_pool_of_the_same_name_waits_until_the_old_children_are_gone(
    serving: Harness,
) -> None:
    before = serving.children()
    delete("InferencePool", "demo")(serving)
    await serving.look()
    resource = sample("sim")
    resource["metadata"]["uid"] = "another"
    serving.server.put(resource)
    with pytest.raises(Conflict, match="an earlier pool with this name"):
        await serving.look()
    assert serving.writes() == []
    for body in before:  # as the garbage collector does, because their owner is gone
        serving.server.remove(body)
    assert await serving.look() == CHILDREN_OF_SIM


# --- writes that the API server refuses -----------------------------------------------------------


async def test_no_pod_is_created_without_its_network_policies(harness: Harness) -> None:
    harness.server.refuses = lambda method, path: 422 * ("networkpolicies" in path)
    with pytest.raises(Incomplete, match="1 objects refused"):
        await harness.look()
    assert harness.writes() == ["PATCH secrets/demo-auth"]
    assert harness.verdict("Applied")[0] == "False"
    harness.server.refuses = lambda method, path: 0
    assert await harness.look() == CHILDREN_OF_SIM[1:]
    assert harness.verdict("Applied")[0] == "True"


async def test_an_object_of_another_client_is_not_taken_over(harness: Harness) -> None:
    name = {"name": "demo-router", "namespace": KEY.namespace}
    foreign = {"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": {"ports": []}}
    harness.server.put(foreign)
    with pytest.raises(Incomplete):
        await harness.look()
    [service] = harness.named("Service", "router")
    assert service["spec"] == foreign["spec"]
    assert harness.writes() == [
        one for one in CHILDREN_OF_SIM if one != "PATCH services/demo-router"
    ]
    assert harness.verdict("Applied")[0] == "False"
    harness.server.remove(foreign)
    assert await harness.look() == ["PATCH services/demo-router"]
    assert harness.verdict("Applied")[0] == "True"


async def test_a_foreign_secret_is_explained_like_any_other_foreign_object(
    harness: Harness,
) -> None:
    name = {"name": "demo-auth", "namespace": KEY.namespace}
    foreign = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": name,
        "data": {"a": "aHVudGVyMg=="},
    }
    harness.server.put(foreign)
    with pytest.raises(Incomplete):
        await harness.look()
    assert harness.writes() == []
    [pool] = harness.named("InferencePool")
    [message] = [one["message"] for one in pool["status"]["conditions"] if one["type"] == "Applied"]
    assert message == (
        "Secret demo-auth: 409: an object with this name exists and does not belong to the pool; "
        "delete it, or rename the pool"
    )


async def test_a_status_is_written_only_to_the_version_it_was_derived_from(
    harness: Harness,
) -> None:
    def edit_the_spec(method: str, path: str) -> int:
        if path.endswith("/status"):
            harness.server.put(sample("sim") | {"spec": {"router": {"replicas": 2}}})
        return 0

    harness.server.refuses = edit_the_spec
    with pytest.raises(Conflict):
        await harness.look()
    assert "status" not in harness.named("InferencePool")[0]
    harness.server.refuses = lambda method, path: 0
    await harness.look()
    [pool] = harness.named("InferencePool")
    assert pool["status"]["observedGeneration"] == pool["metadata"]["generation"] == 2
    assert harness.named("Deployment", "router")[0]["spec"]["replicas"] == 2


def unavailable_after(server: ApiServer, more: int) -> Callable[[str, str], int]:
    end = server.requests + more
    return lambda method, path: 503 * (server.requests > end)


async def test_a_new_operator_finishes_the_work_of_one_that_stopped_at_any_request(
    harness: Harness,
) -> None:
    """The first reconcile is cut off after every fourth of its requests."""
    await harness.look()
    complete, requests = harness.names(), harness.server.requests
    for last in range(1, requests, 4):
        harness.server.objects.clear()
        harness.apply()
        await harness.restart()
        harness.server.refuses = unavailable_after(harness.server, last)
        with pytest.raises(ApiUnavailable):
            await harness.look()
        harness.server.refuses = lambda method, path: 0
        await harness.restart()
        await harness.look()
        assert harness.names() == complete, f"after {last} requests"
        assert harness.verdict("Applied") == ("True", "AsSpecified")


# --- two operators --------------------------------------------------------------------------------


class Two(NamedTuple):
    """An operator that manages the pool, and one of another installation."""

    first: Harness
    second: Harness

    def pass_time(self, seconds: float) -> None:
        for one in self:
            one.advance(seconds)

    def record(self) -> Body:
        [pool] = self.first.named("InferencePool")
        record: Body = pool["status"]["operator"]
        return record


@pytest.fixture
async def two(serving: Harness) -> AsyncIterator[Two]:
    second = Harness(serving.server, "team-b/other-operator")
    yield Two(serving, second)
    await second.routers.close()
    await second.api.close()


async def test_a_second_operator_leaves_the_pool_alone_and_both_say_so(two: Two) -> None:
    for _ in range(3):
        assert await two.second.look() == []
        assert await two.first.look() == []
    assert two.first.verdict("SoleOperator") == ("False", "OtherOperator")
    assert two.first.verdict("Ready") == ("True", "AllReady")
    events = [body for body in two.first.named("Event") if body["type"] == "Warning"]
    assert [body["reason"] for body in events] == ["HeldByOther", "OtherOperator"]
    for body in events:
        assert {"baton-system/baton-operator", "team-b/other-operator"} <= set(
            re.findall(r"[\w-]+/[\w-]+", body["note"])
        )


async def test_two_operators_write_no_more_than_one_mark_each_per_heartbeat(two: Two) -> None:
    for _ in range(2):
        await two.second.look()
        await two.first.look()
    two.first.server.writes.clear()
    for _ in range(6):
        two.pass_time(HEARTBEAT_S / 3)
        for one in two:
            one.watch()
            await one.reconcile()
    assert len(two.first.server.writes) <= 4, two.first.server.writes
    assert {write.rsplit("/", 1)[-1] for write in two.first.server.writes} == {"status"}


async def test_a_second_operator_takes_over_once_the_first_has_been_gone_for_its_time(
    two: Two,
) -> None:
    delete("Service", "router")(two.first)
    await two.second.look()
    two.pass_time(GONE_S - 1)
    assert await two.second.look() == []
    two.pass_time(1)
    assert await two.second.look() == ["PATCH services/demo-router"]
    assert two.record()["name"] == two.second.name
    assert await two.first.look() == []


async def test_a_second_operator_that_is_uninstalled_is_forgotten(two: Two) -> None:
    await two.second.look()
    await two.first.look()
    two.pass_time(GONE_S)
    await two.first.look()
    await two.first.look()
    assert two.first.verdict("SoleOperator") == ("True", "OneOperator")


async def test_a_second_operator_stays_away_from_a_status_that_it_cannot_read(two: Two) -> None:
    [pool] = two.first.named("InferencePool")
    two.first.server.put(pool | {"status": pool["status"] | {"exact": "of a newer version"}})
    delete("Service", "router")(two.first)
    assert await two.second.look() == []
    assert two.record()["name"] == two.first.name


async def test_a_restarted_operator_continues_at_once(two: Two) -> None:
    delete("Service", "router")(two.first)
    await two.first.restart()
    assert await two.first.look() == ["PATCH services/demo-router"]


async def test_of_two_operators_that_see_a_new_pool_only_one_creates_its_children(
    harness: Harness,
) -> None:
    second = Harness(harness.server, "team-b/other-operator")
    harness.watch()
    second.watch()
    await harness.reconcile()
    with pytest.raises(Conflict):
        await second.reconcile()
    assert await second.look() == []
    await second.routers.close()
    await second.api.close()
