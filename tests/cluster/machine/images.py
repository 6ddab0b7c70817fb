"""The images that pods of the test cluster run.

    baton.test/operator:1, baton.test/router:1, baton.test/sim:1   of the Dockerfiles (see `builds`)
    baton.test/redis:7   redis-server and redis-cli from Debian
    baton.test/pause:1   the program that holds a pod's namespaces

In: the checkout, packages of Debian and Python. Out: archives (see `oci`). Slow parts are kept in
the user's cache. To write the archives for an existing cluster's nodes:

    python -m tests.cluster.machine.images FOLDER
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.machine import layers
from tests.cluster.machine.builds import OPERATOR, ROUTER, SIM, SMALL, build_small, image_name
from tests.cluster.machine.layers import SEARCH_PATH, Layer
from tests.cluster.machine.node_files import PAUSE_IMAGE
from tests.cluster.machine.oci import Image, write_image
from tests.cluster.machine.programs import print_progress
from tests.support.project.cache import Progress, made_once
from tests.support.project.debian import install_needed, unpack_redis

OPERATOR_IMAGE = image_name(OPERATOR)
ROUTER_IMAGE = image_name(ROUTER)
SIM_IMAGE = image_name(SIM)
REDIS_IMAGE = "baton.test/redis:7"


def write_pause_image(archive: Path, programs: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pause.layer"
        with Layer(path) as layer:
            layer.add(programs / "pause", "pause")
        write_image(archive, Image(PAUSE_IMAGE, [path], command=["/pause"]))


def redis_image(progress: Progress) -> Path:
    """The archive of the Redis image, in the cache."""
    known: Mapping[str, str] = platform.freedesktop_os_release()
    recipe = hashlib.sha256(Path(layers.__file__).read_bytes()).hexdigest()[:8]
    digest = f"{known['ID']}-{known.get('VERSION_ID', '')}-{recipe}"
    return made_once("redis", digest, lambda folder: _write_redis(folder, progress)) / "redis.tar"


def _write_redis(folder: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        path, unpacked = Path(scratch) / "redis.layer", Path(scratch) / "unpacked"
        unpacked.mkdir()
        unpack_redis(unpacked, progress)
        with Layer(path, unpacked) as layer:
            layer.add_base()
            for name in ("redis-server", "redis-cli"):
                layer.add_copy(unpacked / "usr" / "bin" / name)
            layer.add_libraries((unpacked / "usr" / "lib").glob("*-linux-gnu*"))
        variables = {"PATH": SEARCH_PATH}
        image = Image(REDIS_IMAGE, [path], environment=variables, command=["redis-server"])
        write_image(folder / "redis.tar", image)


def main() -> None:
    """Write archives with all layers, for the nodes of an existing cluster."""
    folder = Path(sys.argv[1])
    install_needed(print_progress)
    build = build_small(print_progress)
    for target in SMALL:
        build.write_whole(target, folder / f"{target.name}.tar")
    shutil.copy(redis_image(print_progress), folder)


if __name__ == "__main__":
    main()
