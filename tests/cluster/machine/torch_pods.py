"""Pods with torch, without its image, which is too large to build and import in each run (5 GB).

In: a model's folder. Out: a part of a pod template. With it, the container `node` runs this
checkout's Python environment, with torch, from read-only mounts of this machine's folders at their
own paths. The long tests build and run the image itself (tests/cluster/test_images.py).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.cluster.machine.builds import CHECKOUT
from tests.cluster.machine.layers import SEARCH_PATH


def torch_pod_overrides(model: Path) -> dict[str, Any]:
    """A patch for a pod template. Merge its lists by the names of their entries."""
    # The environment refers to the checkout by its path, because it is installed in place.
    folders = _outermost([CHECKOUT, Path(sys.prefix), Path(sys.base_prefix), model])
    names = {f"host-{number}": str(folder) for number, folder in enumerate(folders)}
    mounts: list[dict[str, Any]] = [
        {"name": name, "mountPath": folder, "readOnly": True} for name, folder in names.items()
    ]
    # This machine's Python may lie below /root, which an image closes to other users.
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
    """The folders that lie in no other of them."""
    return [
        one
        for one in sorted(set(folders))
        if not any(one != other and one.is_relative_to(other) for other in folders)
    ]
