"""Folders that are built once and kept in the user's cache, outside every checkout.

In: a folder's kind, a digest of its inputs, and a function that fills it. Out: the folder, built
once even if several processes request it at the same time. When a new one is built, folders of its
kind that were not used for a month are removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from baton_cli.models.cache_folder import default_cache

KEPT_S = 30 * 24 * 3600.0

Progress = Callable[[str], None]


def cache_folder() -> Path:
    return default_cache() / "baton" / "cluster"


def made_once(kind: str, digest: str, fill: Callable[[Path], None]) -> Path:
    """Return the folder KIND-DIGEST. If it is missing or incomplete, `fill` gets it empty; the
    files may contain its path, which never changes."""
    folder = cache_folder() / f"{kind}-{digest}"
    complete = folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            _remove_unused(kind)
        complete.touch()
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file's lock. The kernel releases it if the process dies."""
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_unused(kind: str) -> None:
    for complete in cache_folder().glob(f"{kind}-*/.complete"):
        if complete.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(complete.parent, ignore_errors=True)


def is_made(folder: Path) -> bool:
    return os.path.exists(folder / ".complete")
