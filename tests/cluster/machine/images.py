"""The images that pods of the test cluster run, made from this machine and this checkout.

    baton.test/baton:1   operator, router and the simulated node: Python and `baton`, without torch
    baton.test/redis:7   redis-server and redis-cli, of Debian
    baton.test/pause:1   what holds a pod's namespaces

In: the checkout, its Python, Debian's packages. Out: archives (see `oci`). What takes long (Python
with all that Baton depends on, Redis) is kept in the user's cache; Baton itself is packed anew each
time. torch is in none of them (see `torch_pods`). For nodes that are not ours:

    python -m tests.cluster.machine.images FOLDER
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tests.cluster.machine.cache import Progress, made_once
from tests.cluster.machine.environment import (
    IN_IMAGE,
    Environment,
    environment_folder,
    write_source,
)
from tests.cluster.machine.layers import CERTIFICATES, SEARCH_PATH, Layer
from tests.cluster.machine.node_files import PAUSE_IMAGE
from tests.cluster.machine.oci import Image, write_image
from tests.cluster.machine.packages import unpack_redis
from tests.cluster.machine.programs import say

BATON_IMAGE = "baton.test/baton:1"
REDIS_IMAGE = "baton.test/redis:7"
# The larger part of Baton's.
_PYTHON_IMAGE = "baton.test/python:1"


def write_pause_image(archive: Path, programs: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pause.layer"
        with Layer(path) as layer:
            layer.add(programs / "pause", "pause")
        write_image(archive, Image(PAUSE_IMAGE, [path], command=["/pause"]))


def environment_image(environment: Environment) -> Image:
    """Python and what Baton depends on; nodes have it from the start (see `disk`)."""
    variables = {
        "PATH": f"{IN_IMAGE}/bin:{SEARCH_PATH}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "SSL_CERT_FILE": str(CERTIFICATES),
    }
    return Image(_PYTHON_IMAGE, [environment.layer], environment=variables, command=["baton"])


def write_baton_image(archive: Path, progress: Progress, *, whole: bool = False) -> None:
    """From the checkout as it is now. Unless `whole`, for nodes that have `environment_image`."""
    environment = environment_folder(progress)
    below = environment_image(environment)
    with tempfile.TemporaryDirectory() as folder:
        source = write_source(Path(folder), environment)
        image = replace(below, name=BATON_IMAGE, layers=[*below.layers, source])
        write_image(archive, image, without=() if whole else below.layers)


def redis_image(progress: Progress) -> Path:
    """Its archive, in the cache."""
    known: Mapping[str, str] = platform.freedesktop_os_release()
    release = f"{known['ID']}-{known.get('VERSION_ID', '')}"
    return made_once("redis", release, lambda folder: _write_redis(folder, progress)) / "redis.tar"


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
    """Write what pods run as whole archives, for the nodes of a cluster that is not ours."""
    folder = Path(sys.argv[1])
    write_baton_image(folder / "baton.tar", say, whole=True)
    shutil.copy(redis_image(say), folder)


if __name__ == "__main__":
    main()
