"""Definitions of resources, installed for as long as tests need them.

In: a cluster and a manifest. Out: the cluster serves the resource; afterwards it is as it was, so
that other tests can install theirs (Helm refuses what is not its own). With a definition all its
objects go, so never on a cluster that is not ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

from tests.cluster.machine.client import Kubernetes
from tests.support.needs import needs


@contextmanager
def definition(cluster: Kubernetes, manifest: Mapping[str, Any]) -> Iterator[None]:
    needs("own_cluster")
    name = f"crd/{manifest['metadata']['name']}"
    cluster.kubectl("create", "-f", "-", stdin=yaml.safe_dump(dict(manifest)))
    try:
        cluster.kubectl("wait", "--for=condition=Established", name, "--timeout=60s")
        yield
    finally:
        cluster.kubectl("delete", name, "--timeout=60s")
