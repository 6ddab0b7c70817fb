"""CustomResourceDefinitions that are installed while a test needs them.

In: a cluster and a manifest. Out: the cluster serves the resource. Afterwards the definition is
deleted, because other tests install their own (Helm refuses a definition that it did not create).
Deleting a definition deletes all its objects, so this runs only on clusters of our own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import yaml

from tests.cluster.machine.client import CommandFailed, Kubernetes
from tests.support.needs import needs

SERVED_S = 180.0
CLEAN_S = 30.0
GONE_S = 120.0


@contextmanager
def definition(cluster: Kubernetes, manifest: Mapping[str, Any]) -> Iterator[None]:
    needs("own_cluster")
    name = f"crd/{manifest['metadata']['name']}"
    cluster.kubectl("create", "-f", "-", stdin=yaml.safe_dump(dict(manifest)))
    try:
        established(cluster, name)
        yield
    finally:
        remove_definitions(cluster, name)


def established(cluster: Kubernetes, name: str) -> None:
    """Wait until the definition is served. `kubectl wait` fails at once for a new definition that
    has no conditions yet."""
    conditions = "jsonpath={range .status.conditions[*]}{.type}={.status} {end}"
    until = time.monotonic() + SERVED_S
    while "Established=True" not in cluster.kubectl("get", name, f"--output={conditions}"):
        assert time.monotonic() < until, f"{name} is not served after {SERVED_S:g} s"
        time.sleep(0.1)


def remove_definitions(cluster: Kubernetes, *names: str) -> None:
    """Delete these definitions, if they exist, with all their objects. The server's own clean-up
    can take over two minutes, so finalizers of definitions that remain are removed."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=false", *names)
    for remaining in _left(cluster, names, CLEAN_S):
        with suppress(CommandFailed):  # it was deleted in the meantime
            cluster.kubectl(
                "patch", remaining, "--type=merge", '-p={"metadata":{"finalizers":null}}'
            )
    assert not _left(cluster, names, GONE_S), "definitions still exist"


def _left(cluster: Kubernetes, names: Sequence[str], wait_s: float) -> list[str]:
    """The definitions that still exist after `wait_s`."""
    until = time.monotonic() + wait_s
    while remaining := cluster.kubectl("get", *names, "--ignore-not-found", "-o", "name").split():
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    return remaining
