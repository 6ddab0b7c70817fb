"""Properties that make a repeated server-side apply a no-op: the API server compares manifests
field by field, and list items by their keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from baton_operator.builders import build_pool
from tests.support.kubernetes.manifests import SAMPLES, containers, sample_pool, templates


def walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, one in value.items():
            yield from walk(one, f"{path}.{key}")
    elif isinstance(value, list):
        for position, one in enumerate(value):
            yield from walk(one, f"{path}[{position}]")


@pytest.mark.parametrize("name", SAMPLES)
def test_no_value_is_null_and_every_key_is_a_string(name: str) -> None:
    for manifest in build_pool(sample_pool(name)):
        for path, value in walk(manifest):
            assert isinstance(value, dict | list | str | int), path
            if isinstance(value, dict):
                assert all(isinstance(key, str) for key in value), path


@pytest.mark.parametrize("name", SAMPLES)
def test_every_port_has_a_protocol(name: str) -> None:
    found = 0
    for manifest in build_pool(sample_pool(name)):
        for path, value in walk(manifest):
            if manifest["kind"] in ("Ingress", "HTTPRoute") or not path.endswith(".ports"):
                continue
            found += len(value)
            assert {port["protocol"] for port in value} == {"TCP"}, path
    assert found > 0


LIST_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",),
    "ownerReferences": ("uid",),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_no_list_has_two_items_with_the_same_key(name: str) -> None:
    for manifest in build_pool(sample_pool(name)):
        for path, value in walk(manifest):
            keys = LIST_KEYS.get(path.rpartition(".")[2], ())
            if keys and isinstance(value, list):
                seen = Counter(tuple(item[key] for key in keys) for item in value)
                assert max(seen.values(), default=1) == 1, path


@pytest.mark.parametrize("name", SAMPLES)
def test_quantities_are_strings_and_every_mount_has_a_volume(name: str) -> None:
    for template in templates(build_pool(sample_pool(name))).values():
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        for container in containers(template):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            for amounts in container.get("resources", {}).values():
                assert all(isinstance(amount, str) for amount in amounts.values())
                assert amounts
