"""The on-disk state of a model download: complete files, partial files, and a lock.

    ORG--NAME/model.safetensors               a complete file: right size and content
    ORG--NAME/model.safetensors.OWNER.part    a partial file, written by one process only
    ORG--NAME/.fetching.json                  the plan: commit, names, sizes, digests
    ORG--NAME/.fetched.json                   the same, written when all files are complete
    .ORG--NAME.lock                           held by the process that fetches

In: the hub's listing. Out: a folder that is complete or can be resumed, even if its process was
killed. Other processes, also on other machines that share the folder, can read its progress. On a
volume without working locks, two processes may both download, each into its own partial files.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

MARKER = ".fetched.json"
PLAN = ".fetching.json"
PART = ".part"
SHA256_DIGITS = 64


class WantedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files that a folder should hold: the hub's commit, and sizes in bytes by file name.
    `digests` are the hub's, each a sha256 or a git blob name. `weights` False leaves out weights.
    """

    commit: str
    files: Mapping[str, int]
    digests: Mapping[str, str] = {}
    weights: bool = True

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class DownloadFolder:
    """A model's folder `path`. `owner` is this process's unique name; it contains no dots."""

    path: Path
    owner: str

    def complete(self, *, weights: bool = True) -> WantedFiles | None:
        """Return the completed plan if all its files are here, else None. A plan without weights
        counts only with `weights` False."""
        wanted = self._read(MARKER)
        if wanted is None or wanted.weights < weights:
            return None
        here = all(_size(self.path / name) == size for name, size in wanted.files.items())
        return wanted if here else None

    def progress(self) -> tuple[int, int]:
        """Return the bytes here, from any process, and the bytes wanted; (0, 0) without a plan."""
        wanted = self._read(PLAN) or self._read(MARKER)
        if wanted is None:
            return 0, 0
        done, parts = 0, self._parts()
        for name in wanted.files:
            whole = _size(self.path / name)
            done += max(parts.get(name, {}).values(), default=0) if whole is None else whole
        return done, wanted.bytes

    def part(self, name: str) -> Path:
        """This process's partial file for `name`."""
        return self.path / f"{name}.{self.owner}{PART}"

    def have(self, name: str) -> int:
        """The size in bytes of this process's partial file, 0 without one."""
        return _size(self.part(name)) or 0

    def begin(self, wanted: WantedFiles) -> None:
        """Start or resume a download: write the plan, keep files of the same commit and remove
        those of another. For each file, take over the largest partial file that another process
        left."""
        self.path.mkdir(parents=True, exist_ok=True)
        before = self._read(PLAN) or self._read(MARKER)
        same = before is not None and before.commit == wanted.commit
        old = before.files if before is not None else {}
        for name in {*wanted.files, *old}:
            size = _size(self.path / name)
            if size is None:
                continue  # missing: no unlink, another process may be creating it now
            if not same or (name in wanted.files and size != wanted.files[name]):
                (self.path / name).unlink(missing_ok=True)
        for name, parts in self._parts().items():
            limit = wanted.files.get(name, -1) if same else -1
            self._adopt(name, {part: size for part, size in parts.items() if size <= limit})
            for part in parts.keys() - {self.part(name)}:
                part.unlink(missing_ok=True)
        (self.path / MARKER).unlink(missing_ok=True)
        self._write(PLAN, wanted)

    def _adopt(self, name: str, parts: Mapping[Path, int]) -> None:
        if parts:
            largest = max(parts, key=parts.__getitem__)
            # Without working locks the writer may still be alive, and may take the file back or
            # keep writing to its open file. In that case the file is copied, not renamed.
            take = Path.rename if self._is_locked() else shutil.copyfile
            with contextlib.suppress(FileNotFoundError):
                take(largest, self.part(name))

    def drop(self, name: str) -> None:
        """Delete this process's partial file."""
        self.part(name).unlink(missing_ok=True)

    def settle(self, name: str, wanted: WantedFiles) -> bool:
        """Check a fully downloaded file, and rename it to its final name.

        Return False, and keep nothing, if its size or digest is wrong (a power loss can corrupt a
        partial file) or if it is gone (possible on a volume without locks).
        """
        part, digest = self.part(name), wanted.digests.get(name, "")
        try:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            whole = _size(part) == wanted.files[name]
            if not whole or (digest and _digest(part, digest) != digest):
                self.drop(name)
                return False
            part.rename(self.path / name)
        except FileNotFoundError:
            return False
        return True

    def finish(self, wanted: WantedFiles) -> None:
        self._write(MARKER, wanted)
        (self.path / PLAN).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Try to take the lock, and yield whether this process holds it. The kernel releases the
        lock when its process ends, even by a kill."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = self._open_lock()
        try:
            yield _takes_lock(handle)
        finally:
            os.close(handle)

    def _is_locked(self) -> bool:
        """Whether the lock is held. Inside locked(), this shows whether the volume's locks work."""
        handle = self._open_lock()
        try:
            return not _takes_lock(handle)
        finally:
            os.close(handle)

    def _open_lock(self) -> int:
        place = self.path.with_name(f".{self.path.name}.lock")
        return os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _parts(self) -> dict[str, dict[Path, int]]:
        """The partial files of all processes with their sizes in bytes, by file name."""
        parts: dict[str, dict[Path, int]] = {}
        for part in self.path.glob(f"*{PART}"):
            name, size = part.name.removesuffix(PART).rpartition(".")[0], _size(part)
            if size is not None:
                parts.setdefault(name, {})[part] = size
        return parts

    def _read(self, name: str) -> WantedFiles | None:
        """Read a plan; None if it is missing, or damaged and so to be fetched again."""
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=WantedFiles)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _write(self, name: str, wanted: WantedFiles) -> None:
        """Write a plan atomically: to a temporary file, then by a rename."""
        new = self.part(name)
        with new.open("wb") as file:
            file.write(msgspec.json.encode(wanted))
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path / name)


def _takes_lock(handle: int) -> bool:
    """Try to take the lock. False if another handle holds it, even one of this process."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _digest(path: Path, like: str) -> str:
    """The digest of a file's content: a sha256 if `like` is one, else a git blob name."""
    with path.open("rb") as file:
        if len(like) == SHA256_DIGITS:
            return hashlib.file_digest(file, "sha256").hexdigest()
        # Git names a blob by the SHA-1 of this header and the content.
        head = b"blob %d\0" % os.fstat(file.fileno()).st_size
        begun = hashlib.sha1(head, usedforsecurity=False)
        return hashlib.file_digest(file, lambda: begun).hexdigest()
