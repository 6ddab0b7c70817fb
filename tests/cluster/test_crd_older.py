"""Pools that were stored under an older definition, in an API server with the current one."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import yaml

from baton_operator.api.crd import crd
from tests.cluster.applied_pools import Json, apply, pool, write_status
from tests.cluster.crd_cases import SIM
from tests.cluster.installed import definition, established
from tests.cluster.machine.client import CommandFailed, Kubernetes

SERVED_S = 120.0
LATER = "2026-01-02T00:00:00Z"
# Accepted by the older definition, refused in a new pool.
DUPLICATE_HOSTNAMES = {
    "httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["a.example.com"] * 2}
}


def older_definition(definition: Json) -> Json:
    """An older definition, in which lists were atomic and times any text."""
    older = copy.deepcopy(definition)
    [version] = older["spec"]["versions"]

    def remove_list_types(schema: Any) -> None:
        if isinstance(schema, list):
            for one in schema:
                remove_list_types(one)
        elif isinstance(schema, dict):
            for key in ("list-type", "list-map-keys", "map-type"):
                schema.pop(f"x-kubernetes-{key}", None)
            if schema.get("format") == "date-time":
                del schema["format"]
            for one in schema.values():
                remove_list_types(one)

    properties = version["schema"]["openAPIV3Schema"]["properties"]
    conditions = properties["status"]["properties"]["conditions"]
    remove_list_types(properties)
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    conditions["items"]["required"].remove("message")
    del properties["status"]["properties"]["autoscaling"]["required"]
    route = properties["spec"]["properties"]["router"]["properties"]["httpRoute"]["properties"]
    for key in ("namespace", "sectionName"):
        del route["parentRefs"]["items"]["properties"][key]["default"]
    return older


def test_a_pool_of_an_older_definition_can_still_be_edited(
    control_plane: Kubernetes,
) -> None:
    with definition(control_plane, older_definition(crd())):
        namespace = control_plane.new_namespace()
        old = SIM | {
            "router": {
                "httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["a.example.com"]}
            },
        }
        where = ("-n", namespace)
        apply(control_plane, namespace, "platform", old)
        twice = json.dumps(pool("twice", SIM | {"router": DUPLICATE_HOSTNAMES}))
        control_plane.kubectl("create", *where, "-f", "-", stdin=twice)
        condition = {"type": "Ready", "status": "True", "reason": "AllReady"}
        status_fields = {
            "conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "model": {"name": "m", "progress": "", "progressTime": ""},
        }
        write_status(control_plane, namespace, status_fields)

        control_plane.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(crd())
        )
        established(control_plane, f"crd/{crd()['metadata']['name']}")
        wait_until_validated_by_new_definition(control_plane, namespace)

        for name in ("demo", "twice"):
            patch = ("patch", f"bpool/{name}", *where, "--type=merge", "-p")
            control_plane.kubectl(*patch, json.dumps({"spec": {"paused": True}}))
        of_team = {
            "router": {
                "httpRoute": {
                    "parentRefs": [{"name": "internal"}],
                    "hostnames": ["b.example.com"],
                }
            },
        }
        apply(control_plane, namespace, "team", of_team)
        now = apply(control_plane, namespace, "platform", old)
        assert now["paused"]
        assert now["router"]["httpRoute"]["hostnames"] == ["a.example.com", "b.example.com"]
        assert [one["name"] for one in now["router"]["httpRoute"]["parentRefs"]] == [
            *("public", "internal")
        ]
        kept = json.loads(control_plane.kubectl("get", "bpool/twice", *where, "-o", "json"))["spec"]
        assert kept["paused"]
        assert kept["router"]["httpRoute"]["hostnames"] == ["a.example.com"] * 2

        status_fields = {
            "conditions": [condition | {"lastTransitionTime": LATER, "message": "all is well"}]
        }
        command = ("apply", "--server-side", "--subresource=status", "--force-conflicts")
        text = json.dumps(pool("demo", None) | {"status": status_fields})
        args = ("--field-manager=baton-operator", "-n", namespace, "-f", "-", "-o", "json")
        status = json.loads(control_plane.kubectl(*command, *args, stdin=text))["status"]
        assert status["conditions"] == status_fields["conditions"]


def wait_until_validated_by_new_definition(cluster: Kubernetes, namespace: str) -> None:
    """Wait until the API server validates by the newer definition, shortly after its update."""
    twice = json.dumps(pool("other", SIM | {"router": DUPLICATE_HOSTNAMES}))
    create = ("create", "-n", namespace, "--dry-run=server", "-f", "-")
    until = time.monotonic() + SERVED_S
    while True:
        try:
            cluster.kubectl(*create, stdin=twice)
        except CommandFailed:
            return
        assert time.monotonic() < until, "the API server still validates by the older definition"
        time.sleep(0.1)
