"""A node's disk, with the images that do not change from run to run.

In: the images' parts in the user's cache. Out: a folder in that cache, filled once by a containerd
that we start. Each node copies it in half a second, while an import of Python and all packages
would take 10 s of both cores at each start. It holds all layers of the Dockerfiles' images except
the last ones, which change with the sources.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.machine.builds import SMALL, Build
from tests.cluster.machine.images import redis_image, write_pause_image
from tests.cluster.machine.node import CONTAINERD_FOLDER, Node, NodeContext
from tests.cluster.machine.processes import Processes
from tests.cluster.machine.sweep import free_slot
from tests.support.project.cache import Progress, made_once


def node_disk(programs: Path, build: Build, progress: Progress) -> Path:
    """The disk for `Cluster`, made if it does not exist yet (half a minute)."""
    redis = redis_image(progress)
    version = subprocess.run(["containerd", "--version"], capture_output=True, check=True).stdout
    layers = [layer for target in SMALL for layer in build.facts(target).layers[:-1]]
    parts = (programs.name, redis.parent.name, *layers, version.decode())
    digest = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        progress("unpacking images for the nodes")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pause = Path(scratch) / "pause.tar"
            write_pause_image(pause, programs)
            built = [Path(scratch) / f"{target.name}.tar" for target in SMALL]
            for target, archive in zip(SMALL, built, strict=True):
                build.write_whole(target, archive)
            _import_into(folder, programs, [pause, redis, *built])

    return made_once("disk", digest, fill)


def _import_into(folder: Path, programs: Path, archives: list[Path]) -> None:
    with free_slot() as slot:
        processes = Processes(slot.state / "logs", str(slot.state))
        try:
            slot.network.up()
            context = NodeContext(
                programs, None, slot.state, "", slot.addresses, slot.network, processes
            )
            node = Node("node-1", 1, context)
            node.start()
            for archive in archives:
                node.import_image(archive)
            node.kill()
            shutil.move(slot.state / node.name / CONTAINERD_FOLDER, folder)
        finally:
            processes.close()
            slot.sweep()
