"""Pools that were written under the definition before, in an API server that has this one now."""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import yaml

from baton_operator.api.crd import crd
from tests.cluster.crd_cases import SIM
from tests.cluster.installed import definition, established
from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.cluster.test_crd_appliers import Json, apply, pool, write_status

SERVED_S = 120.0
LATER = "2026-01-02T00:00:00Z"
# Taken then, refused in a new pool now.
TWICE = {"httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["a.example.com"] * 2}}


def as_before(definition: Json) -> Json:
    """The definition as it was when lists were one applier's, and times any text."""
    found = copy.deepcopy(definition)
    [version] = found["spec"]["versions"]

    def plain(schema: Any) -> None:
        if isinstance(schema, list):
            for one in schema:
                plain(one)
        elif isinstance(schema, dict):
            for key in ("list-type", "list-map-keys", "map-type"):
                schema.pop(f"x-kubernetes-{key}", None)
            if schema.get("format") == "date-time":
                del schema["format"]
            for one in schema.values():
                plain(one)

    properties = version["schema"]["openAPIV3Schema"]["properties"]
    conditions = properties["status"]["properties"]["conditions"]
    plain(properties)
    conditions |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    conditions["items"]["required"].remove("message")
    del properties["status"]["properties"]["autoscaling"]["required"]
    route = properties["spec"]["properties"]["router"]["properties"]["httpRoute"]["properties"]
    for key in ("namespace", "sectionName"):
        del route["parentRefs"]["items"]["properties"][key]["default"]
    return found


def test_a_pool_of_the_definition_before_lives_on_and_is_edited_under_this_one(
    control_plane: Kubernetes,
) -> None:
    with definition(control_plane, as_before(crd())):
        namespace = control_plane.new_namespace()
        old = SIM | {
            "router": {
                "httpRoute": {"parentRefs": [{"name": "public"}], "hostnames": ["a.example.com"]}
            },
        }
        where = ("-n", namespace)
        apply(control_plane, namespace, "platform", old)
        twice = json.dumps(pool("twice", SIM | {"router": TWICE}))
        control_plane.kubectl("create", *where, "-f", "-", stdin=twice)
        condition = {"type": "Ready", "status": "True", "reason": "AllReady"}
        said = {
            "conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "model": {"name": "m", "progress": "", "progressTime": ""},
        }
        write_status(control_plane, namespace, said)

        control_plane.kubectl(
            "apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump(crd())
        )
        established(control_plane, f"crd/{crd()['metadata']['name']}")
        wait_until_judged_anew(control_plane, namespace)

        for name in ("demo", "twice"):
            patch = ("patch", f"bpool/{name}", *where, "--type=merge", "-p")
            control_plane.kubectl(*patch, json.dumps({"spec": {"paused": True}}))
        theirs = {
            "router": {
                "httpRoute": {
                    "parentRefs": [{"name": "internal"}],
                    "hostnames": ["b.example.com"],
                }
            },
        }
        apply(control_plane, namespace, "team", theirs)
        now = apply(control_plane, namespace, "platform", old)
        assert now["paused"]
        assert now["router"]["httpRoute"]["hostnames"] == ["a.example.com", "b.example.com"]
        assert [one["name"] for one in now["router"]["httpRoute"]["parentRefs"]] == [
            *("public", "internal")
        ]
        kept = json.loads(control_plane.kubectl("get", "bpool/twice", *where, "-o", "json"))["spec"]
        assert kept["paused"]
        assert kept["router"]["httpRoute"]["hostnames"] == ["a.example.com"] * 2

        said = {"conditions": [condition | {"lastTransitionTime": LATER, "message": "all is well"}]}
        command = ("apply", "--server-side", "--subresource=status", "--force-conflicts")
        text = json.dumps(pool("demo", None) | {"status": said})
        words = ("--field-manager=baton-operator", "-n", namespace, "-f", "-", "-o", "json")
        status = json.loads(control_plane.kubectl(*command, *words, stdin=text))["status"]
        assert status["conditions"] == said["conditions"]


def wait_until_judged_anew(cluster: Kubernetes, namespace: str) -> None:
    """The server does so a moment after it has the newer definition."""
    twice = json.dumps(pool("other", SIM | {"router": TWICE}))
    create = ("create", "-n", namespace, "--dry-run=server", "-f", "-")
    until = time.monotonic() + SERVED_S
    while True:
        try:
            cluster.kubectl(*create, stdin=twice)
        except CommandFailed:
            return
        assert time.monotonic() < until, "the definition is still the one before"
        time.sleep(0.1)
