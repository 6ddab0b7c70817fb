"""The cache: its contents, the pools that it marks, and deletions that a watch has missed."""

from __future__ import annotations

from typing import Any

import pytest

from baton_operator.kube.kinds import CHILDREN, key_of, kind_of
from baton_operator.state.cache import Cache, PoolKey
from baton_operator.state.child import digest_of
from baton_operator.state.observed import FirstSeen
from baton_operator.state.watch import Backoffs
from tests.operator.state.bodies import pod, pool, service
from tests.support.clock import Clock
from tests.support.kubernetes.pod_bodies import RUNNING, THEN, container
from tests.support.kubernetes.pod_bodies import pod as pod_body

KEY = PoolKey("ns", "pool")
SERVICE = next(kind for kind in CHILDREN if kind.kind == "Service")


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def marked_pools() -> list[PoolKey]:
    return []


@pytest.fixture
def cache(marked_pools: list[PoolKey], clock: Clock) -> Cache:
    return Cache(marked_pools.append, clock)


def test_a_new_child_marks_its_pool(cache: Cache, marked_pools: list[PoolKey]) -> None:
    cache.see_child(service(1))
    assert marked_pools == [KEY]


def test_the_age_of_a_pod_s_state_counts_from_when_the_operator_first_saw_it(
    cache: Cache, clock: Clock
) -> None:
    def seen(body: dict[str, Any], **how: bool) -> FirstSeen:
        found = cache.see_child(body, **how).pod
        assert found is not None
        return found.seen

    clock.now = 100
    cache.see_pool(pool(1))
    assert seen(pod(1, ready=False)) == FirstSeen(
        created=100, readiness=100, unprepared=100, drain=100
    )
    clock.advance(5)
    assert seen(pod(2, ready=False)).readiness == 100
    clock.advance(5)
    assert seen(pod(3, ready=True)) == FirstSeen(
        created=100, readiness=110, unprepared=100, drain=100
    )
    clock.advance(5)
    marked = {"baton.dev/drain-since": "2999-01-01T00:00:00Z"}
    assert seen(pod(4, ready=True, **marked), ours=True).drain == 115
    clock.advance(5)
    assert seen(pod(5, ready=True, **marked)) == FirstSeen(
        created=100, readiness=110, unprepared=100, drain=115
    )
    assert seen(pod(6, ready=True, uid="another", **marked)).drain == 120


def test_a_child_with_only_a_new_version_marks_no_pool(
    cache: Cache, marked_pools: list[PoolKey]
) -> None:
    cache.see_child(service(1))
    cache.see_child(service(2))
    assert marked_pools == [KEY]
    assert cache.children(KEY)[key_of(service(2))].version == 2


def test_our_own_writes_mark_no_pool(cache: Cache, marked_pools: list[PoolKey]) -> None:
    cache.see_pool(pool(1))
    cache.see_child(service(1), ours=True)
    cache.see_child(service(1))
    assert marked_pools == [KEY]


def test_our_own_writes_do_not_bring_a_deleted_pool_back(cache: Cache) -> None:
    cache.see_pool(pool(1))
    cache.lose_pool(KEY, "u")
    cache.see_pool(pool(2), ours=True)
    cache.see_child(service(3), ours=True)
    assert cache.pool(KEY) is None
    assert not cache.children(KEY)


def test_an_older_event_changes_nothing(cache: Cache) -> None:
    cache.see_pool(pool(1))
    cache.see_child(service(5, port=5), ours=True)
    assert cache.see_child(service(3, port=3)).digest == digest_of(service(5, port=5))


def test_a_listing_replaces_even_a_newer_version(cache: Cache) -> None:
    cache.see_child(service(5, port=5))
    assert cache.see_child(service(3, port=3), listed=True).version == 3


def test_the_deletion_of_a_replaced_object_does_not_delete_its_successor(
    cache: Cache,
) -> None:
    cache.see_child(service(5, uid="second"))
    cache.lose_child(KEY, key_of(service(5)), "first")
    assert cache.children(KEY)


def test_a_lost_child_marks_its_pool(cache: Cache, marked_pools: list[PoolKey]) -> None:
    cache.see_child(service(1))
    cache.lose_child(KEY, key_of(service(1)), "u")
    assert marked_pools == [KEY, KEY]
    assert not cache.children(KEY)


def metadata_of(body: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = body["metadata"]
    return metadata


def test_a_listing_without_a_child_drops_it(cache: Cache, marked_pools: list[PoolKey]) -> None:
    cache.see_child(service(1))
    assert cache.compare_listing(SERVICE, [], cache.children_of_kind(SERVICE, None)) == []
    assert not cache.children(KEY)
    assert marked_pools == [KEY, KEY]


def test_a_listing_returns_new_and_newer_objects(cache: Cache) -> None:
    cache.see_child(service(1))
    known = cache.children_of_kind(SERVICE, "ns")
    other = service(7, name="another")
    found = cache.compare_listing(SERVICE, [metadata_of(service(2)), metadata_of(other)], known)
    assert found == [key_of(service(2)), key_of(other)]


def test_a_child_that_arrived_after_the_listing_began_stays(cache: Cache) -> None:
    known = cache.children_of_kind(SERVICE, None)
    cache.see_child(service(1))
    cache.compare_listing(SERVICE, [], known)
    assert cache.children(KEY)


def test_the_lag_of_the_watch_is_the_age_of_our_write_that_it_has_not_shown(
    cache: Cache, clock: Clock
) -> None:
    cache.see_pool(pool(1))
    cache.see_child(service(1), ours=True)
    clock.now = 7.0
    assert cache.unseen_s() == 7.0
    cache.see_child(service(1))
    assert cache.unseen_s() == 0.0


def test_a_listing_confirms_a_write_like_a_watch_event(cache: Cache, clock: Clock) -> None:
    cache.see_pool(pool(1))
    cache.see_child(service(2), ours=True)
    clock.now = 7.0
    cache.compare_listing(SERVICE, [metadata_of(service(2))], cache.children_of_kind(SERVICE, None))
    assert cache.unseen_s() == 0.0


def test_only_an_inference_pool_of_baton_is_an_owner(cache: Cache) -> None:
    owner = {"kind": "InferencePool", "name": "pool", "uid": "x"}
    other = [owner | {"apiVersion": "inference.networking.k8s.io/v1"}]
    assert cache.see_child(service(1, ownerReferences=other)).owner == ""
    ours = [owner | {"apiVersion": "baton.dev/v1alpha1"}]
    assert cache.see_child(service(2, ownerReferences=ours)).owner == "x"


def test_a_pool_is_marked_once_for_each_version(cache: Cache, marked_pools: list[PoolKey]) -> None:
    cache.see_pool(pool(1))
    cache.see_pool(pool(1))
    cache.see_pool(pool(2))
    assert marked_pools == [KEY, KEY]


def test_a_deleted_pool_is_dropped_and_marked(cache: Cache, marked_pools: list[PoolKey]) -> None:
    cache.see_pool(pool(1))
    cache.lose_pool(KEY, "u")
    assert cache.pool(KEY) is None
    assert marked_pools == [KEY, KEY]


def test_the_digest_of_a_secret_does_not_show_its_values() -> None:
    secret = {**service(1), "kind": "Secret", "data": {"password": "Z2VoZWlt"}}
    assert "Z2VoZWlt" not in digest_of(secret)
    assert digest_of(secret) != digest_of({**secret, "data": {"password": "YW5kZXJz"}})


def test_paths_follow_the_kubernetes_api() -> None:
    assert SERVICE.path("ns", "x") == "/api/v1/namespaces/ns/services/x"
    deployment = kind_of({"apiVersion": "apps/v1", "kind": "Deployment"})
    assert deployment.path(None) == "/apis/apps/v1/deployments"


def silent_pod(version: int, since: str = THEN) -> dict[str, Any]:
    """Return a pod as Kubernetes leaves it when its machine has not reported for a while."""
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": since}
    body = pod_body(container(RUNNING, ready=True), status={"conditions": [ready]})
    body["metadata"] |= {"namespace": "ns", "uid": "p", "resourceVersion": str(version)}
    body["metadata"]["labels"]["baton.dev/pool"] = "pool"
    return body


def ready_pod(version: int) -> dict[str, Any]:
    body = silent_pod(version)
    body["status"]["conditions"][0]["status"] = "True"
    return body


def test_a_silent_node_is_lost_at_once_unless_the_api_server_was_away(
    cache: Cache, clock: Clock
) -> None:
    clock.now = 100.0
    cache.see_child(ready_pod(1))
    assert not cache.settles(KEY)
    cache.see_child(silent_pod(2))
    assert not cache.settles(KEY)
    cache.see_child(ready_pod(3))
    cache.note_unanswered()
    assert not cache.settles(KEY)
    clock.now = 130.0
    cache.see_child(silent_pod(4))
    assert cache.settles(KEY)
    clock.now = 150.0
    cache.see_child(ready_pod(5))
    assert not cache.settles(KEY)


@pytest.mark.parametrize("failing", [False, True], ids=["an outage", "requests that never succeed"])
def test_a_node_that_does_not_report_for_a_minute_is_lost(
    cache: Cache, clock: Clock, failing: bool
) -> None:
    clock.now = 1000.0
    cache.see_child(ready_pod(1))
    cache.note_unanswered()
    cache.see_child(silent_pod(2))
    for after_s in range(0, 120, 5):
        clock.now = 1000.0 + after_s
        if failing:
            cache.note_unanswered()
        assert cache.settles(KEY) is (after_s < 60)


def test_a_new_operator_waits_for_reports_as_after_an_outage(cache: Cache, clock: Clock) -> None:
    cache.see_child(silent_pod(1))
    assert cache.settles(KEY)
    clock.now = 60.0
    assert not cache.settles(KEY)


def test_each_failed_attempt_of_kopf_is_reported() -> None:
    failed: list[bool] = []
    pauses = iter(Backoffs(lambda: failed.append(True)))
    assert next(pauses) == 0.2
    assert not failed
    assert [next(pauses) for _ in range(6)] == [0.5, 1, 2, 3, 5, 5]
    assert len(failed) == 6
