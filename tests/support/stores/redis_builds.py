"""The Redis builds that tests start: the users' default, and a newer one with jemalloc.

    bundled   the one that baton_kvstore finds: 6.2, with the C library's allocator
    debian    the distribution's (7.0 in Debian 12), unpacked into the user's cache, never installed

In: the name of a build. Out: a program that starts as if it were installed.
"""

from __future__ import annotations

import platform
import shlex
from pathlib import Path

from baton_kvstore.embedded.redis_binary import find_redis_server
from tests.support.needs import needs
from tests.support.project.cache import made_once
from tests.support.project.debian import unpack_redis

BUILDS = ("bundled", "debian")
WRAPPER = "redis-server"


def redis_server(build: str) -> Path:
    """Return a build's program; skip the calling test if it is not available."""
    return find_redis_server() if build == "bundled" else debian_redis()


def debian_redis() -> Path:
    needs("apt")
    known = platform.freedesktop_os_release()
    release = f"{known['ID']}-{known.get('VERSION_ID', '')}"
    return made_once("redis-server", release, _unpack) / WRAPPER


def _unpack(folder: Path) -> None:
    """Unpack Redis with its libraries, and write a script that starts it with these."""
    root = folder / "root"
    root.mkdir()
    unpack_redis(root, print)
    libraries = ":".join(sorted({str(path.parent) for path in root.glob("usr/lib/**/*.so.*")}))
    program = root / "usr" / "bin" / "redis-server"
    wrapper = folder / WRAPPER
    wrapper.write_text(
        f"#!/bin/sh\nLD_LIBRARY_PATH={shlex.quote(libraries)} exec {shlex.quote(str(program))} "
        '"$@"\n'
    )
    wrapper.chmod(0o755)
