"""Content digests of a checkpoint's tensors, which name the weights in the fingerprint. No torch.

In: the folder. Out: one TensorDigest per tensor that determines the model, equal for equal content
wherever and however sharded it lies. Hashing costs about a second per GiB, so digests are cached:
in a hidden JSON file in the folder, keyed by file size and modification time, or, where the folder
cannot be written, under $XDG_CACHE_HOME/baton. A cache that is missing, stale or corrupt is
computed again. Files changed less than a second ago are not cached: a second change within the
clock's granularity would keep size and time. Who has fetched the weights and vouches that nobody
changes them any more keeps the digests at once, so that nodes that may only read find them.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from baton_engine.config import ModelConfig
from baton_engine.weight_files import Entry, ignorable, read_entries, weight_files
from baton_protocol.fingerprint import TensorDigest

CACHE_NAME = ".baton-digests.json"
CACHE_VERSION = 1
FRESH_NS = 1_000_000_000

logger = logging.getLogger(__name__)


class _FileDigests(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    tensors: tuple[TensorDigest, ...]


class _Cache(msgspec.Struct, frozen=True):
    version: int
    files: dict[str, _FileDigests]


def tensor_digests(folder: Path, config: ModelConfig, *, threads: int = 4) -> list[TensorDigest]:
    """Digests of all tensors that the model uses, from the cache where it is valid."""
    known = _read_cache(folder)
    found = _find(folder, known, threads)
    if found != known:
        newest = time.time_ns() - FRESH_NS
        _write_cache(folder, {name: one for name, one in found.items() if one.mtime_ns < newest})
    return [
        tensor
        for digests in found.values()
        for tensor in digests.tensors
        if not ignorable(tensor.name, config)
    ]


def keep_digests(folder: Path, *, threads: int = 4) -> None:
    """Cache the digests of files that nobody changes any more, however new they are. Raise
    WeightsError."""
    known = _read_cache(folder)
    found = _find(folder, known, threads)
    if found != known:
        _write_cache(folder, found)


def _find(
    folder: Path, known: Mapping[str, _FileDigests], threads: int
) -> Mapping[str, _FileDigests]:
    """By file name: what is known where the file has not changed, else computed."""
    found: dict[str, _FileDigests] = {}
    for path in weight_files(folder):
        status = path.stat()
        cached = known.get(path.name)
        if cached and (cached.size, cached.mtime_ns) == (status.st_size, status.st_mtime_ns):
            found[path.name] = cached
        else:
            tensors = _hash_file(path, threads)
            found[path.name] = _FileDigests(status.st_size, status.st_mtime_ns, tensors)
    return found


def _hash_file(path: Path, threads: int) -> tuple[TensorDigest, ...]:
    entries = read_entries(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:

        def one(entry: Entry) -> TensorDigest:
            with memoryview(data) as whole, whole[entry.begin : entry.end] as part:
                digest = hashlib.sha256(part).hexdigest()  # releases the GIL
            return TensorDigest(entry.name, entry.shape, entry.dtype, digest)

        with ThreadPoolExecutor(threads) as pool:
            return tuple(pool.map(one, entries))


def _cache_places(folder: Path) -> tuple[Path, ...]:
    """Beside the weights, so that every user of the folder shares it; else the user's own."""
    shared = folder / CACHE_NAME
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and /etc/passwd does not list the user: so in containers
        return (shared,)
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    return shared, home / "baton" / "digests" / f"{name}.json"


def _read_cache(folder: Path) -> Mapping[str, _FileDigests]:
    for place in _cache_places(folder):
        try:
            cache = msgspec.json.decode(place.read_bytes(), type=_Cache)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("ignoring digest cache %s: %s", place, error)
            continue
        if cache.version == CACHE_VERSION:
            return cache.files
    return {}


def _write_cache(folder: Path, found: Mapping[str, _FileDigests]) -> None:
    if not found:
        return
    data = msgspec.json.encode(_Cache(CACHE_VERSION, dict(found)))
    for place in _cache_places(folder):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, data)
        except OSError as error:
            logger.info("cannot keep digests in %s: %s", place, error)
            continue
        return


def _replace(place: Path, data: bytes) -> None:
    """Write beside, then rename: a reader never sees half a file."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".baton-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, place)
    except OSError:
        os.unlink(name)
        raise
