"""Pods with torch: its image is too large to be built and imported for each run (5 GB).

In: a model's folder. Out: the part of a pod template by which its container `node` runs the
checkout's own environment, with torch, from this machine: each folder read-only, at its own path.
The image itself is built and started by the long tests (tests/cluster/test_images.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.cluster.machine.builds import CHECKOUT
from tests.cluster.machine.layers import SEARCH_PATH


def torch_pod_overrides(model: Path) -> dict[str, Any]:
    """To be merged over a pod template by the names of its lists' entries."""
    # The checkout is installed in place: its environment holds the path to it.
    folders = _outermost([CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), model])
    names = {f"host-{number}": str(folder) for number, folder in enumerate(folders)}
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": folder, "readOnly": True} for name, folder in names.items()
    ]
    # An image's /root is closed to other users, where this machine's Python may be at home.
    mounts.append({"name": "home", "mountPath": "/root"})
    path = {"name": "PATH", "value": f"{sys.prefix}/bin:{SEARCH_PATH}"}
    volumes: list[dict[str, Any]] = [
        {"name": name, "hostPath": {"path": folder, "type": "Directory"}}
        for name, folder in names.items()
    ]
    volumes.append({"name": "home", "emptyDir": {}})
    node = {"name": "node", "env": [path], "volumeMounts": mounts}
    return {"spec": {"volumes": volumes, "containers": [node]}}


def _outermost(folders: list[Path]) -> list[Path]:
    """Without those that lie in another one."""
    return [
        one
        for one in sorted(set(folders))
        if not any(one != other and one.is_relative_to(other) for other in folders)
    ]
