"""The operator's client against a real API server: its requests, and how it reports failures.

Without an API server: tests/operator/kube/test_client.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton_operator.kube.client import (
    FIELD_MANAGER,
    Api,
    ApiUnavailable,
    Conflict,
    Refused,
    TooManyRequests,
)
from baton_operator.kube.connection import load
from baton_operator.kube.kinds import CHILDREN, HTTP_ROUTE, SECRET, ChildKey, key_of
from tests.cluster.fault_proxy import Answer, FaultProxy
from tests.cluster.machine.client import Kubernetes

SERVICE = next(kind for kind in CHILDREN if kind.kind == "Service")


@pytest.fixture
def requests() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def api(control_plane: Kubernetes, requests: list[tuple[str, str]]) -> AsyncIterator[Api]:
    one = await client(control_plane.kubeconfig, requests)
    yield one
    await one.close()


async def client(
    kubeconfig: Path, requests: list[tuple[str, str]] | None = None, timeout_s: float = 60.0
) -> Api:
    config = await load({"KUBECONFIG": str(kubeconfig)})
    recorded: list[tuple[str, str]] = [] if requests is None else requests
    return Api(config, lambda verb, code: recorded.append((verb, code)), timeout_s)


def service(namespace: str, port: int = 80, **metadata: Any) -> dict[str, Any]:
    object_metadata = {
        "name": "one",
        "namespace": namespace,
        "labels": {"mine": "yes"},
        **metadata,
    }
    spec = {"selector": {"a": "b"}, "ports": [{"name": "http", "port": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": object_metadata, "spec": spec}


def deployment(namespace: str) -> dict[str, Any]:
    """A paused Deployment, so that no pods are created."""
    labels = {"mine": "yes"}
    container = {"name": "c", "image": "i"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    object_metadata = {"name": "one", "namespace": namespace}
    spec = {"replicas": 1, "paused": True, "selector": {"matchLabels": labels}}
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": object_metadata}
    return body | {"spec": spec | {"template": template}}


async def wait_observed(api: Api, key: ChildKey) -> dict[str, Any]:
    """The Deployment once its controller has observed it. Until then its version may change."""
    async with asyncio.timeout(120.0):
        while True:
            stored = await api.get(key)
            assert stored is not None
            if (
                stored.get("status", {}).get("observedGeneration")
                == stored["metadata"]["generation"]
            ):
                return stored
            await asyncio.sleep(0.05)


async def test_apply_creates_and_changes_as_our_field_manager(
    api: Api, namespace: str, requests: list[tuple[str, str]]
) -> None:
    created = await api.apply(service(namespace))
    changed = await api.apply(service(namespace, 81))
    assert changed["metadata"]["uid"] == created["metadata"]["uid"]
    assert changed["spec"]["ports"][0]["port"] == 81
    [manager] = changed["metadata"]["managedFields"]
    assert (manager["manager"], manager["operation"]) == (FIELD_MANAGER, "Apply")
    assert requests == [("apply", "201"), ("apply", "200")]


async def test_apply_overrides_other_managers_and_keeps_their_own_fields(
    api: Api, control_plane: Kubernetes, namespace: str
) -> None:
    await api.apply(service(namespace))
    patch = {"spec": {"selector": {"a": "x"}, "sessionAffinity": "ClientIP"}}
    text = f"--patch={json.dumps(patch)}"
    control_plane.kubectl("patch", "service", "one", "-n", namespace, "--type=merge", text)
    stored = await api.apply(service(namespace))
    assert stored["spec"]["selector"] == {"a": "b"}
    assert stored["spec"]["sessionAffinity"] == "ClientIP"


async def test_a_missing_object_is_none(api: Api, namespace: str) -> None:
    assert await api.get(ChildKey("v1", "Service", namespace, "none")) is None
    route = ChildKey(HTTP_ROUTE.api_version, HTTP_ROUTE.kind, namespace, "none")
    assert await api.get(route) is None


async def test_delete_removes_only_the_object_with_this_uid(api: Api, namespace: str) -> None:
    created = await api.apply(service(namespace))
    key = key_of(created)
    await api.delete(key, "another uid")
    assert await api.get(key) is not None
    await api.delete(key, created["metadata"]["uid"])
    assert await api.get(key) is None
    await api.delete(key, created["metadata"]["uid"])


async def test_set_replicas_changes_only_replicas_and_only_of_this_uid_and_version(
    api: Api, namespace: str, requests: list[tuple[str, str]]
) -> None:
    created = await wait_observed(api, key_of(await api.apply(deployment(namespace))))
    uid, version = created["metadata"]["uid"], int(created["metadata"]["resourceVersion"])
    lowered = await api.set_replicas(key_of(created), uid, version, 0)
    assert lowered["spec"] == created["spec"] | {"replicas": 0}
    with pytest.raises(Conflict):
        await api.set_replicas(key_of(created), uid, version, 2)
    # The controller writes no more, so only the uid is wrong.
    newest = int((await wait_observed(api, key_of(lowered)))["metadata"]["resourceVersion"])
    with pytest.raises(Conflict):
        await api.set_replicas(key_of(created), "another", newest, 2)
    assert [verb for verb, _ in requests if verb != "get"] == ["apply", "patch", "patch", "patch"]


async def test_set_replicas_of_a_deleted_object_is_a_conflict(api: Api, namespace: str) -> None:
    with pytest.raises(Conflict, match="is gone"):
        await api.set_replicas(key_of(deployment(namespace)), "any", 1, 0)


async def test_a_listing_holds_metadata_selected_by_label(api: Api, namespace: str) -> None:
    await api.apply(service(namespace))
    await api.apply(service(namespace, name="two", labels={}))
    [stored] = await api.list_metadata(SERVICE, namespace, "mine")
    assert stored["name"] == "one"
    assert len(await api.list_metadata(SERVICE, namespace)) == 2


async def test_a_listing_can_be_empty(api: Api, namespace: str) -> None:
    assert await api.list_metadata(SECRET, namespace, "mine") == []
    assert await api.list_metadata(HTTP_ROUTE, namespace) == []


async def test_an_update_of_a_changed_object_is_a_conflict(api: Api, namespace: str) -> None:
    created = await api.apply(service(namespace))
    await api.apply(service(namespace, 81))
    with pytest.raises(Conflict):
        await api.update(created)
    with pytest.raises(Conflict):
        await api.create(service(namespace))


async def test_a_refusal_holds_the_server_s_message(api: Api, namespace: str) -> None:
    with pytest.raises(Refused, match=r"spec\.ports\[0\]\.port") as caught:
        await api.apply(service(namespace, 0))
    assert caught.value.code == 422


async def test_a_kind_that_is_not_installed_is_refused(api: Api, namespace: str) -> None:
    metadata = {"name": "one", "namespace": namespace}
    route = {"apiVersion": HTTP_ROUTE.api_version, "kind": HTTP_ROUTE.kind, "metadata": metadata}
    with pytest.raises(Refused, match="the cluster does not have HTTPRoute"):
        await api.apply(route)


async def test_too_many_requests_holds_retry_after(
    control_plane: Kubernetes, namespace: str, tmp_path: Path
) -> None:
    with FaultProxy(control_plane.kubeconfig, tmp_path) as proxy:
        proxy.watch(lambda call: Answer(429, {"Retry-After": "7"}))
        api = await client(proxy.kubeconfig)
        with pytest.raises(TooManyRequests) as caught:
            await api.apply(service(namespace))
        assert caught.value.retry_after_s == 7
        await api.close()


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_a_failing_server_is_unavailable(
    control_plane: Kubernetes, namespace: str, tmp_path: Path, status: int
) -> None:
    with FaultProxy(control_plane.kubeconfig, tmp_path) as proxy:
        proxy.watch(lambda call: Answer(status))
        api = await client(proxy.kubeconfig)
        with pytest.raises(ApiUnavailable, match=str(status)):
            await api.apply(service(namespace))
        await api.close()
