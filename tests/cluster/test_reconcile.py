"""The operator as a process against a real API server: the children that it creates and keeps.

Here is what only a real server shows: which edits reach which children, that each kind is watched
and repaired, fields of other managers, garbage collection, Secrets, log and probes. The laws of the
reconcile are in tests/operator/controller/test_reconcile.py.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest

from baton_operator.api.crd import crd, scaler_crd
from baton_operator.controller.pool_secret import SECRET_S
from baton_operator.controller.reconcile import UNREADY_AGAIN_S
from tests.cluster.field_edits import EDITS, FIELDS_WITHOUT_CHILDREN, Edit, fields
from tests.cluster.installed import definition
from tests.cluster.machine.client import Kubernetes
from tests.cluster.operators import ROUTES, SIM, ApiClient, Body, Operator, Pool, print_log, until

# Less than the period of the resync (300 s), which would repair everything in the end.
REPAIR_S = 120.0
# The operator does not watch Secrets. It reads one again when its last read is SECRET_S old.
SECRET_REPAIR_S = 5 * (SECRET_S + UNREADY_AGAIN_S)


@pytest.fixture(scope="module")
def operator(
    control_plane: Kubernetes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("operator")
    with (
        definition(control_plane, crd()),
        definition(control_plane, scaler_crd()),
        definition(control_plane, ROUTES),
        Operator(control_plane.kubeconfig, folder) as one,
    ):
        yield one


@pytest.fixture(autouse=True)
def print_log_after(operator: Operator) -> Iterator[None]:
    yield
    print_log(operator)


@pytest.fixture
def pool(
    operator: Operator, control_plane: Kubernetes, api_client: ApiClient, namespace: str
) -> Iterator[Pool]:
    one = Pool(control_plane, api_client, namespace)
    yield one
    one.delete()


@pytest.fixture(scope="module")
def edited(operator: Operator, control_plane: Kubernetes, api_client: ApiClient) -> Iterator[Pool]:
    """One pool for all edits. Each edit reverts the one before."""
    namespace = control_plane.new_namespace()
    one = Pool(control_plane, api_client, namespace)
    try:
        one.apply(SIM)
        until(lambda: "Service/pool-router" in one.children(), "the last child")
        yield one
        one.delete()
    finally:
        control_plane.delete_namespace(namespace)


def create(pool: Pool, spec: Any = SIM) -> dict[str, Body]:
    """Create the pool; return its children once they are complete."""
    pool.apply(spec)
    until(lambda: pool.condition("Applied").get("status") == "True", "condition Applied")
    return pool.children()


def desired(body: Body) -> Body:
    """The fields that a user or the operator sets: all but metadata and status."""
    return {name: value for name, value in body.items() if name not in ("metadata", "status")}


def test_a_pool_gets_exactly_its_children(pool: Pool) -> None:
    children = create(pool)
    revision = pool.body()["status"]["revision"]
    assert sorted(children) == [
        f"Deployment/pool-decode-{revision}",
        "Deployment/pool-kv-data-0",
        "Deployment/pool-kv-index",
        f"Deployment/pool-prefill-{revision}",
        "Deployment/pool-router",
        *(f"NetworkPolicy/pool-{name}" for name in ("decode", "kv-data", "kv-index", "prefill")),
        "NetworkPolicy/pool-router",
        *(f"PodDisruptionBudget/pool-{name}" for name in ("decode", "prefill", "router")),
        "Secret/pool-auth",
        *(f"Service/pool-{name}" for name in ("kv-data-0", "kv-index", "router")),
    ]
    resource = pool.body()
    assert not resource["metadata"].get("finalizers")
    assert not resource["metadata"].get("annotations")
    for child in children.values():
        [owner] = child["metadata"]["ownerReferences"]
        assert owner["uid"] == resource["metadata"]["uid"]
        assert owner["controller"]


def test_the_edits_cover_every_field() -> None:
    assert {edit.field for edit in EDITS} | FIELDS_WITHOUT_CHILDREN == fields()


@pytest.mark.parametrize("edit", EDITS, ids=[edit.field for edit in EDITS])
def test_an_edit_reaches_the_children(operator: Operator, edited: Pool, edit: Edit) -> None:
    def reached() -> bool:
        children = edited.children().values()
        children_in_where = [_children_of(children, *where) for where in edit.where]
        if not edit.text:
            return not any(children_in_where)
        return all(edit.text in json.dumps(one) for one in children_in_where)

    assert not reached()
    edited.apply({**SIM, **edit.spec})
    until(reached, edit.field)


def _children_of(children: Any, kind: str, component: str) -> list[Body]:
    return [
        desired(child) | {"notes": child["metadata"].get("annotations", {})}
        for child in children
        if child["kind"] == kind and child["metadata"]["labels"]["baton.dev/component"] == component
    ]


class Drift(NamedTuple):
    """A hand-made change of one child, as a merge patch."""

    child: str
    patch: Body


DRIFTS = (
    Drift("Deployment/pool-router", {"spec": {"replicas": 7}}),
    Drift("Deployment/pool-kv-data-0", {"spec": {"replicas": 7}}),
    Drift("Service/pool-router", {"spec": {"selector": {"baton.dev/component": "decode"}}}),
    Drift("NetworkPolicy/pool-router", {"spec": {"ingress": []}}),
    Drift("PodDisruptionBudget/pool-decode", {"spec": {"minAvailable": 5}}),
    Drift("Ingress/pool-router", {"spec": {"rules": [{"host": "else.example.org"}]}}),
    Drift("HTTPRoute/gate-router", {"spec": {"parentRefs": [{"name": "else"}]}}),
)


class Drifting(NamedTuple):
    """Two pools in one namespace, because a pool has only one kind of route."""

    pools: tuple[Pool, Pool]

    def child(self, name: str) -> Body:
        """A child of either pool; {} if it does not exist."""
        return self.pools[0].one(name)

    def uid(self, name: str) -> str:
        uid: str = self.child(name).get("metadata", {}).get("uid", "")
        return uid


@pytest.fixture(scope="module")
def drifting(
    operator: Operator, control_plane: Kubernetes, api_client: ApiClient
) -> Iterator[Drifting]:
    namespace = control_plane.new_namespace()
    pools = (
        Pool(control_plane, api_client, namespace),
        Pool(control_plane, api_client, namespace, "gate"),
    )
    try:
        create(pools[0], {**SIM, "router": {"ingress": {"host": "llm.example.org"}}})
        create(pools[1], {**SIM, "router": {"httpRoute": {"parentRefs": [{"name": "gate"}]}}})
        yield Drifting(pools)
        for one in pools:
            one.delete()
    finally:
        control_plane.delete_namespace(namespace)


@pytest.mark.parametrize("drift", DRIFTS, ids=[drift.child for drift in DRIFTS])
def test_drift_is_repaired_without_waiting_for_the_resync(
    operator: Operator, drifting: Drifting, drift: Drift
) -> None:
    before = desired(drifting.child(drift.child))
    args = ("--type=merge", f"--patch={json.dumps(drift.patch)}", "-o", "json")
    drifted = json.loads(drifting.pools[0].kubectl("patch", drift.child, *args))
    assert desired(drifted) != before
    until(lambda: desired(drifting.child(drift.child)) == before, "the repair", REPAIR_S)


@pytest.mark.parametrize("child", [drift.child for drift in DRIFTS])
def test_a_deleted_child_is_recreated_without_waiting_for_the_resync(
    operator: Operator, drifting: Drifting, child: str
) -> None:
    old = drifting.uid(child)
    drifting.pools[0].kubectl("delete", child, "--wait=false")
    until(lambda: drifting.uid(child) not in ("", old), "the new one", REPAIR_S)


def test_a_removed_label_of_a_child_is_restored(operator: Operator, drifting: Drifting) -> None:
    drifting.pools[0].kubectl("label", "service", "pool-router", "baton.dev/pool-")

    def label() -> object:
        metadata = drifting.child("Service/pool-router")["metadata"]
        return metadata["labels"].get("baton.dev/pool")

    until(lambda: label() == "pool", "the label", REPAIR_S)


class TamperedPool(NamedTuple):
    """A pool with a changed Secret; the Secret and the pool's revision before the change."""

    pool: Pool
    before: Body
    revision: str

    def secret(self) -> Body:
        """The pool's Secret; {} if it does not exist."""
        return self.pool.one(f"Secret/{self.pool.name}-auth")


@pytest.fixture(scope="module")
def tampered(
    operator: Operator, control_plane: Kubernetes, api_client: ApiClient
) -> Iterator[dict[str, TamperedPool]]:
    """Two pools at once, because the operator rereads a Secret only after half a minute."""
    namespace, pools = control_plane.new_namespace(), dict[str, TamperedPool]()
    try:
        for name in ("drifted", "damaged"):
            pool = Pool(control_plane, api_client, namespace, name)
            create(pool)
            secret, status = pool.one(f"Secret/{name}-auth"), pool.body()["status"]
            pools[name] = TamperedPool(pool, secret, status["revision"])
        yield pools
        for one in pools.values():
            one.pool.delete()
    finally:
        control_plane.delete_namespace(namespace)


@pytest.fixture(scope="module", autouse=True)
def tamper(tampered: dict[str, TamperedPool]) -> None:
    """Change the Secrets first, so that the operator's wait passes during the other tests."""
    for name, key in (("drifted", "users.acl"), ("damaged", "link-token")):
        patch = json.dumps({"data": {key: "eA=="}})
        args = ("--type=merge", f"--patch={patch}", "-o", "json")
        output = tampered[name].pool.kubectl("patch", "secret", f"{name}-auth", *args)
        assert json.loads(output)["data"] != tampered[name].before["data"]


def test_drift_of_the_secret_is_repaired_at_the_next_read(
    tampered: dict[str, TamperedPool],
) -> None:
    one = tampered["drifted"]
    until(lambda: desired(one.secret()) == desired(one.before), "the repair", SECRET_REPAIR_S)


def test_a_damaged_secret_gets_new_values_and_the_pods_roll(
    tampered: dict[str, TamperedPool],
) -> None:
    one = tampered["damaged"]
    until(
        lambda: one.pool.body()["status"]["revision"] != one.revision,
        "another revision",
        SECRET_REPAIR_S,
    )
    assert one.secret()["data"]["link-token"] != "eA=="


def test_fields_of_other_managers_are_left_alone(pool: Pool) -> None:
    create(pool)
    pool.kubectl("annotate", "deployment", "pool-router", "team=blue")
    pool.kubectl(
        "patch", "deployment", "pool-router", "--type=merge",
        '--patch={"spec":{"revisionHistoryLimit":3}}',
    )  # fmt: skip
    pool.patch({"router": {"replicas": 4}})
    until(lambda: pool.child("Deployment", "router")["spec"]["replicas"] == 4, "the edit")
    router = pool.child("Deployment", "router")
    assert router["metadata"]["annotations"]["team"] == "blue"
    assert router["spec"]["revisionHistoryLimit"] == 3


def test_a_deleted_pool_leaves_no_children(pool: Pool) -> None:
    create(pool)
    pool.delete()

    def left() -> str:
        kinds = "deployment,service,secret,networkpolicy,pod,replicaset"
        return pool.kubectl("get", kinds, "-o", "name")

    until(lambda: not left().strip(), "the end of all children")


def test_no_secret_value_is_in_log_status_events_or_other_children(
    operator: Operator, pool: Pool
) -> None:
    children = create(pool)
    secret = children.pop("Secret/pool-auth")
    events = pool.kubectl("get", "events", "-o", "json")
    text = json.dumps([pool.body(), *children.values()]) + events + operator.log()
    for encoded in (secret["data"]["redis-password"], secret["data"]["link-token"]):
        decoded = base64.b64decode(encoded).decode()
        assert decoded not in text
        assert encoded not in text


def test_the_operator_answers_probes_and_serves_metrics(operator: Operator, pool: Pool) -> None:
    create(pool)
    assert "watch_lag_s" in _get(operator.health_port, "healthz")
    metrics = _get(operator.metrics_port, "metrics")
    assert 'baton_operator_reconciles_total{result="done"}' in metrics
    assert 'baton_operator_api_requests_total{code="200",verb="apply"}' in metrics
    up_to_date = re.compile(r"^baton_operator_watch_lag_seconds 0(\.0)?$", re.MULTILINE)
    until(lambda: up_to_date.search(_get(operator.metrics_port, "metrics")), "no lag")


def _get(port: int, path: str) -> str:
    with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def test_log_lines_are_json_with_the_project_s_fields(operator: Operator) -> None:
    lines = [json.loads(line) for line in operator.log().splitlines()]
    assert lines
    for line in lines:
        assert {"time", "level", "logger", "message"} <= line.keys()
        assert "settings" not in line
