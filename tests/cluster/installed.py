"""Definitions of resources, installed for as long as tests need them.

In: a cluster and a manifest. Out: the cluster serves the resource; afterwards it is as it was, so
that other tests can install theirs (Helm refuses what is not its own). With a definition all its
objects go, so never on a cluster that is not ours.
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
    """Wait until it is served. Not by `kubectl wait`: that fails at once for a definition which is
    so new that it has no conditions yet."""
    conditions = "jsonpath={range .status.conditions[*]}{.type}={.status} {end}"
    until = time.monotonic() + SERVED_S
    while "Established=True" not in cluster.kubectl("get", name, f"--output={conditions}"):
        assert time.monotonic() < until, f"{name} is not served after {SERVED_S:g} s"
        time.sleep(0.1)


def remove_definitions(cluster: Kubernetes, *names: str) -> None:
    """With all their objects, also where there are none. The server's own clean-up has been seen to
    take over two minutes; what it leaves goes without, as it is nothing that a test looks at."""
    cluster.kubectl("delete", "--ignore-not-found", "--wait=false", *names)
    for left in _left(cluster, names, CLEAN_S):
        with suppress(CommandFailed):  # it went in this very moment
            cluster.kubectl("patch", left, "--type=merge", '-p={"metadata":{"finalizers":null}}')
    assert not _left(cluster, names, GONE_S), "definitions are still there"


def _left(cluster: Kubernetes, names: Sequence[str], wait_s: float) -> list[str]:
    """Those that are there after so long."""
    until = time.monotonic() + wait_s
    while left := cluster.kubectl("get", *names, "--ignore-not-found", "-o", "name").split():
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    return left
