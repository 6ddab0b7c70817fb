"""Content digests of a checkpoint's tensors, which identify the weights in the fingerprint. No
torch.

In: the folder, or the GGUF file. Out: one TensorDigest per tensor that determines the model. Equal
content has equal digests, whatever its folder and sharding. Hashing takes about a second per GiB,
so digests are cached in a hidden JSON file in the folder (beside a GGUF file), or under
$XDG_CACHE_HOME/baton if the folder cannot be written. A missing, stale or corrupt cache is computed
again.

A cached digest is valid while the file's size, mtime, ctime and inode are unchanged. ctime and
inode detect tools that keep the mtime, and replaced files. A file that changed less than two
seconds before it was hashed is not cached: a second change within the granularity of the file
system's clock would not change its times (git calls such files racily clean). keep_digests() caches
the digests at once. It is for code that has fetched the weights and knows that they no longer
change, so nodes with a read-only folder find the digests. `verify` hashes everything again, which
also detects disk corruption and a clock that was set back.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from baton_engine.config.model_config import ModelConfig
from baton_engine.errors import WeightsError
from baton_engine.weights.checkpoint import read_entries, weight_files
from baton_engine.weights.safetensors_files import Entry, ignorable
from baton_protocol.fingerprint import TensorDigest
from baton_text.gguf.header import is_gguf

CACHE_NAME = ".baton-digests.json"
CACHE_VERSION = 2
FRESH_NS = 2_000_000_000  # 2 s, the granularity of FAT, the coarsest file system clock in use

logger = logging.getLogger(__name__)


class FileState(msgspec.Struct, frozen=True):
    """A file's metadata. If two states are equal, the file has not changed in between."""

    size: int
    inode: int
    mtime_ns: int
    ctime_ns: int


class _FileDigests(msgspec.Struct, frozen=True):
    state: FileState
    tensors: tuple[TensorDigest, ...]


class _Cache(msgspec.Struct, frozen=True):
    version: int
    files: dict[str, _FileDigests]


def tensor_digests(
    folder: Path,
    config: ModelConfig,
    *,
    threads: int = 4,
    verify: bool = False,
    clock_ns: Callable[[], int] = time.time_ns,
) -> list[TensorDigest]:
    """Digests of all tensors that the model uses, from the cache if it is valid. `verify` hashes
    all files again, with `threads` threads. Raises WeightsError."""
    cached = _read_cache(folder)
    settled_ns = clock_ns() - FRESH_NS
    file_digests = _find(folder, {} if verify else cached, threads)
    for name, digests_of_file in file_digests.items():
        if (
            name in cached
            and cached[name].state == digests_of_file.state
            and cached[name] != digests_of_file
        ):
            logger.warning("%s: the digests kept for %s were wrong; corrected", folder, name)
    if file_digests != cached:
        kept = {
            name: digests_of_file
            for name, digests_of_file in file_digests.items()
            if max(digests_of_file.state.mtime_ns, digests_of_file.state.ctime_ns) < settled_ns
        }
        _write_cache(folder, kept)
    return [
        tensor
        for digests in file_digests.values()
        for tensor in digests.tensors
        if not ignorable(tensor.name, config)
    ]


def keep_digests(folder: Path, *, threads: int = 4) -> None:
    """Cache the digests of all files, even of files that changed a moment ago. Call it only if the
    files no longer change. Raises WeightsError."""
    cached = _read_cache(folder)
    digests = _find(folder, cached, threads)
    if digests != cached:
        _write_cache(folder, digests)


def file_states(folder: Path) -> dict[str, FileState]:
    """States of the checkpoint's files, by name."""
    return {path.name: _state(path) for path in weight_files(folder)}


def check_unchanged(folder: Path, before: Mapping[str, FileState]) -> None:
    """Raise WeightsError if a file of the checkpoint has changed since file_states() returned
    `before`."""
    now = file_states(folder)
    changed = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    if changed:
        raise WeightsError(
            f"{', '.join(changed)} in {folder} changed while the weights were read, so what was"
            " loaded has no name; start again once nobody writes there"
        )


def _state(path: Path) -> FileState:
    status = path.stat()
    return FileState(status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)


def _find(
    folder: Path, known: Mapping[str, _FileDigests], threads: int
) -> Mapping[str, _FileDigests]:
    """Digests by file name: the known ones for unchanged files, computed ones for the rest."""
    digests: dict[str, _FileDigests] = {}
    changed: dict[Path, tuple[FileState, list[Entry]]] = {}
    files = weight_files(folder)
    for path in files:
        state, cached = _state(path), known.get(path.name)
        if cached and cached.state == state:
            digests[path.name] = cached
        else:
            # All headers first: a broken last file is found before the others are hashed.
            changed[path] = state, read_entries(path)
    for path, (state, entries) in changed.items():
        digests[path.name] = _FileDigests(state, _hash_file(path, entries, threads))
    check_unchanged(folder, {name: file_digests.state for name, file_digests in digests.items()})
    return {path.name: digests[path.name] for path in files}


def _hash_file(path: Path, entries: Sequence[Entry], threads: int) -> tuple[TensorDigest, ...]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:

        def one(entry: Entry) -> TensorDigest:
            with memoryview(data) as whole, whole[entry.begin : entry.end] as part:
                digest = hashlib.sha256(part).hexdigest()  # releases the GIL
            return TensorDigest(entry.name, entry.shape, entry.dtype, digest)

        with ThreadPoolExecutor(threads) as pool:
            return tuple(pool.map(one, entries))


def _cache_places(folder: Path) -> tuple[Path, ...]:
    """Paths to try in order: beside the weights, where all users of the folder share the cache,
    then the user's own cache."""
    shared = folder / CACHE_NAME
    if is_gguf(folder):
        shared = folder.with_name(f".{folder.name}{CACHE_NAME}")
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and the user is not in /etc/passwd, as in containers
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


def _write_cache(folder: Path, digests: Mapping[str, _FileDigests]) -> None:
    if not digests:
        return
    data = msgspec.json.encode(_Cache(CACHE_VERSION, dict(digests)))
    for place in _cache_places(folder):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            _replace(place, data)
        except OSError as error:
            logger.info("cannot keep digests in %s: %s", place, error)
            continue
        return


def _replace(place: Path, data: bytes) -> None:
    """Write a temporary file, then rename it, so a reader never sees half a file."""
    handle, name = tempfile.mkstemp(dir=place.parent, prefix=".baton-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)
        os.replace(name, place)
    except OSError:
        os.unlink(name)
        raise
