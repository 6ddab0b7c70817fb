"""plan: the actions that lead from the known children to the desired ones."""

from __future__ import annotations

from typing import Any

from baton_operator.api.pool import Pool
from baton_operator.builders import Manifest, build_pool
from baton_operator.controller.diff import (
    Action,
    Applied,
    Apply,
    Delete,
    Foreign,
    diff_children,
    manifest_digest,
)
from baton_operator.kube.kinds import ChildKey, key_of
from baton_operator.rollout.goal import Lower
from baton_operator.state.child import CachedChild
from tests.operator.children import DESIRED, POOL, PROVEN, cached, labels_of, live, old_nodes

STORE = [one for one in DESIRED if labels_of(one)["baton.dev/component"] in ("kv-index", "kv-data")]


def applied(*bodies: Manifest) -> dict[ChildKey, Applied]:
    """Return records that each body is the result of applying its own manifest."""
    by_key = {key_of(manifest): manifest_digest(manifest) for manifest in DESIRED}
    children = cached(*bodies)
    return {key: Applied(by_key[key], one.uid, one.digest) for key, one in children.items()}


def planned(
    children: dict[ChildKey, CachedChild], done: dict[ChildKey, Applied], pool: Pool = POOL
) -> list[Action]:
    return diff_children(pool.uid, build_pool(pool), children, done)


def test_all_children_of_a_new_pool_are_applied_in_order() -> None:
    actions = planned({}, {})
    assert [act.key for act in actions] == [key_of(manifest) for manifest in DESIRED]
    assert all(isinstance(act, Apply) and not act.seen for act in actions)


def test_unchanged_children_need_no_action() -> None:
    bodies = [live(manifest) for manifest in DESIRED]
    assert planned(cached(*bodies), applied(*bodies)) == []


def test_everything_is_applied_again_after_a_restart_of_the_operator() -> None:
    bodies = [live(manifest) for manifest in DESIRED]
    actions = planned(cached(*bodies), {})
    assert len(actions) == len(DESIRED)
    assert all(isinstance(act, Apply) and act.seen for act in actions)


def test_a_status_written_by_a_controller_needs_no_apply() -> None:
    bodies = [live(manifest) for manifest in DESIRED]
    done = applied(*bodies)
    for body in bodies:
        body["status"] = {"readyReplicas": 1}
        body["metadata"] |= {
            "resourceVersion": "9",
            "generation": 2,
            "managedFields": [{}],
            "annotations": {
                **body["metadata"].get("annotations", {}),
                "deployment.kubernetes.io/revision": "1",
            },
        }
    assert planned(cached(*bodies), done) == []


def test_a_changed_child_is_applied_again() -> None:
    bodies = [live(manifest) for manifest in DESIRED]
    done = applied(*bodies)
    router = next(body for body in bodies if body["metadata"]["name"].endswith("-router"))
    router["metadata"]["labels"] = {**router["metadata"]["labels"], "mine": "too"}
    [act] = planned(cached(*bodies), done)
    assert isinstance(act, Apply)
    assert act.key == key_of(router)


def test_a_child_is_applied_again_when_its_manifest_changes() -> None:
    bodies = [live(manifest) for manifest in DESIRED]
    done = applied(*bodies)
    key = key_of(bodies[-1])
    done[key] = Applied("of another manifest", done[key].uid, done[key].digest)
    [act] = planned(cached(*bodies), done)
    assert act.key == key


def test_a_child_that_another_client_created_again_is_applied() -> None:
    bodies = [live(manifest) for manifest in DESIRED]
    done = applied(*bodies)
    bodies[-1] = live(DESIRED[-1], uid="another")
    [act] = planned(cached(*bodies), done)
    assert act.key == key_of(bodies[-1])


def test_unwanted_objects_are_deleted_last() -> None:
    extra = live(DESIRED[-1], uid="old")
    extra["metadata"] |= {"name": "left-over"}
    bodies = [live(manifest) for manifest in DESIRED]
    actions = planned(cached(*bodies, extra), {})
    assert actions[-1] == Delete(key=key_of(extra), uid="old")
    assert not any(isinstance(act, Delete) for act in actions[:-1])


def test_objects_of_another_owner_are_neither_changed_nor_deleted() -> None:
    bodies = [live(manifest) for manifest in DESIRED]
    done = applied(*bodies)
    other = [{**bodies[-1]["metadata"]["ownerReferences"][0], "uid": "another pool's"}]
    bodies[-1]["metadata"]["ownerReferences"] = other
    extra = live(DESIRED[-1])
    extra["metadata"] |= {"name": "left-over", "ownerReferences": other}
    assert planned(cached(*bodies, extra), done) == [
        Foreign(key=key_of(bodies[-1]), owner=other[0]["name"])
    ]


def test_pods_are_never_deleted() -> None:
    metadata = {**live(DESIRED[-1])["metadata"], "name": "pod"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}}
    bodies = [live(manifest) for manifest in DESIRED]
    assert planned(cached(*bodies, pod), applied(*bodies)) == []


def lower(node: Manifest) -> Manifest:
    """Return the Deployment with 0 replicas."""
    return {**node, "spec": {**node["spec"], "replicas": 0}}


def pod_of(node: Manifest, **status: Any) -> Manifest:
    metadata = {**node["metadata"], "ownerReferences": [], "name": f"{key_of(node).name}-x"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"containers": []},
        "status": status,
    }


def deleted(*bodies: Manifest) -> list[str]:
    actions = planned(cached(*bodies), {})
    return [act.key.name for act in actions if isinstance(act, Delete)]


def test_old_nodes_that_serve_stay_while_new_ones_are_not_ready() -> None:
    now = [live(manifest) for manifest in DESIRED]
    assert deleted(*now, *old_nodes(readyReplicas=1)) == []


def test_old_nodes_that_once_served_stay_although_they_are_not_ready_now() -> None:
    now = [live(manifest) for manifest in DESIRED]
    assert deleted(*now, *old_nodes(**PROVEN)) == []


def test_ready_new_nodes_alone_do_not_cause_the_deletion_of_old_ones() -> None:
    now = [live(manifest, readyReplicas=1) for manifest in DESIRED]
    assert deleted(*now, *old_nodes(readyReplicas=1)) == []


def test_a_deployment_of_old_nodes_is_deleted_after_its_last_pod() -> None:
    now = [live(manifest) for manifest in DESIRED]
    lowered = [lower(node) for node in old_nodes(**PROVEN)]
    pods = [pod_of(node) for node in lowered]
    assert deleted(*now, *lowered, *pods) == []
    assert len(deleted(*now, *lowered, pods[0])) == 1
    assert len(deleted(*now, *lowered)) == 2


def test_a_finished_pod_does_not_keep_its_deployment() -> None:
    now = [live(manifest) for manifest in DESIRED]
    lowered = [lower(node) for node in old_nodes(**PROVEN)]
    pods = [pod_of(node, phase="Failed") for node in lowered]
    assert len(deleted(*now, *lowered, *pods)) == 2


def test_old_nodes_stay_if_only_the_status_of_a_pod_shows_that_they_serve() -> None:
    now = [live(manifest) for manifest in DESIRED]
    old = old_nodes()
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    assert len(deleted(*now, *old, pod_of(old[0], **ready))) == 1


def test_old_nodes_are_scaled_down_after_all_applies_and_before_all_deletions() -> None:
    old, never = old_nodes(readyReplicas=1)[0], old_nodes()[1]
    key = key_of(old)
    one = Lower(key=key, uid="u", version=1, replicas=0)
    actions = diff_children(POOL.uid, DESIRED, cached(old, never), {}, [one])
    kinds = [type(act) for act in actions]
    assert kinds == [Apply] * len(DESIRED) + [Lower, Delete]


def test_old_nodes_that_never_served_are_deleted_at_once() -> None:
    now = [live(manifest) for manifest in DESIRED]
    assert len(deleted(*now, *old_nodes())) == 2


def test_no_old_node_is_deleted_before_the_new_ones_exist() -> None:
    assert deleted(*old_nodes(readyReplicas=1)) == []


def deleted_without_store(*bodies: Manifest) -> set[str]:
    """Return what is deleted when the spec replaces the managed store by an external Redis."""
    wanted = [one for one in DESIRED if one not in STORE]
    actions = diff_children(POOL.uid, wanted, cached(*bodies), {})
    return {act.key.name for act in actions if isinstance(act, Delete)}


def test_the_store_of_old_nodes_stays_until_they_are_gone() -> None:
    now = [live(manifest, readyReplicas=1) for manifest in DESIRED]
    old = [lower(node) for node in old_nodes(**PROVEN)]
    assert deleted_without_store(*now, *old, pod_of(old[1])) == {key_of(old[0]).name}
    store = {one["metadata"]["name"] for one in STORE}
    assert store == {"demo-kv-index", "demo-kv-data", "demo-kv-data-0"}
    assert deleted_without_store(*now, *old) == store | {one["metadata"]["name"] for one in old}


def test_a_store_that_no_old_node_uses_is_deleted_at_once() -> None:
    now = [live(manifest) for manifest in DESIRED]
    assert deleted_without_store(*now) == {one["metadata"]["name"] for one in STORE}


def test_an_unwanted_router_service_is_deleted_even_during_a_roll_out() -> None:
    now = [live(manifest) for manifest in DESIRED]
    service = next(one for one in now if one["kind"] == "Service" and "router" in key_of(one).name)
    extra = {**service, "metadata": service["metadata"] | {"name": "left-over"}}
    assert deleted(*now, extra, *old_nodes(readyReplicas=1)) == ["left-over"]
