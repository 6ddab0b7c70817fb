"""A fetched model's folder on disk: what is complete, what is under way, who works on it.

    ORG--NAME/model.safetensors               complete, of the right size and content
    ORG--NAME/model.safetensors.OWNER.part    its first bytes, written by one process alone
    ORG--NAME/.fetching.json                  what is wanted: the commit, names, sizes, digests
    ORG--NAME/.fetched.json                   the same, written last: all of it is there
    .ORG--NAME.lock                           locked by the one process that fetches

In: what the hub says is to be there. Out: a folder that is complete or can be resumed, whenever its
process was killed. Other processes, also of other machines that share the folder, see how far it
is. On a volume whose locks hold nobody off, two fetch it twice, each into parts of its own.
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


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder is to hold: the hub's commit, and bytes by file name. `digests` are what the
    hub says of them: a sha256, or a git blob's name. `weights` False: all but the weights."""

    commit: str
    files: Mapping[str, int]
    digests: Mapping[str, str] = {}
    weights: bool = True

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Fetched:
    """`path` is the model's folder. `owner`, without dots, is this process and no other one."""

    path: Path
    owner: str

    def complete(self, *, weights: bool = True) -> Wanted | None:
        """What was fetched, if all of it is here."""
        wanted = self._read(MARKER)
        if wanted is None or wanted.weights < weights:
            return None
        here = all(_size(self.path / name) == size for name, size in wanted.files.items())
        return wanted if here else None

    def progress(self) -> tuple[int, int]:
        """Bytes here, by whomever, and bytes wanted; (0, 0) while nobody knows."""
        wanted = self._read(PLAN) or self._read(MARKER)
        if wanted is None:
            return 0, 0
        done, parts = 0, self._parts()
        for name in wanted.files:
            whole = _size(self.path / name)
            done += max(parts.get(name, {}).values(), default=0) if whole is None else whole
        return done, wanted.bytes

    def part(self, name: str) -> Path:
        """Where this process writes a file."""
        return self.path / f"{name}.{self.owner}{PART}"

    def have(self, name: str) -> int:
        """Bytes that this process has of a file."""
        return _size(self.part(name)) or 0

    def begin(self, wanted: Wanted) -> None:
        """Keep what is here of this very commit, drop what is of another. What a process that
        ended has left of a file is ours from now on, the largest part of each."""
        self.path.mkdir(parents=True, exist_ok=True)
        before = self._read(PLAN) or self._read(MARKER)
        same = before is not None and before.commit == wanted.commit
        old = before.files if before is not None else {}
        for name in {*wanted.files, *old}:
            size = _size(self.path / name)
            if size is None:
                continue  # another process may put it there right now
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
            # Where locks hold nobody off, its writer may live and take it back. It may also go on
            # writing into the file that it has open, so there that file is copied.
            take = Path.rename if self._is_locked() else shutil.copyfile
            with contextlib.suppress(FileNotFoundError):
                take(largest, self.part(name))

    def drop(self, name: str) -> None:
        """What this process has of a file."""
        self.part(name).unlink(missing_ok=True)

    def settle(self, name: str, wanted: Wanted) -> bool:
        """A file's last byte is here: from now on it has its name. False, and nothing kept, if it
        is not what the hub says: a part can hold what a machine that lost power left in it, and
        can be gone on a volume without locks."""
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

    def finish(self, wanted: Wanted) -> None:
        self._write(MARKER, wanted)
        (self.path / PLAN).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process may fetch now; not, while another one holds the lock. The kernel
        frees it when its process ends, however."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = self._open_lock()
        try:
            yield _takes_lock(handle)
        finally:
            os.close(handle)

    def _is_locked(self) -> bool:
        """Whether somebody holds the lock: within locked(), whether locks work on this volume."""
        handle = self._open_lock()
        try:
            return not _takes_lock(handle)
        finally:
            os.close(handle)

    def _open_lock(self) -> int:
        place = self.path.with_name(f".{self.path.name}.lock")
        return os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _parts(self) -> dict[str, dict[Path, int]]:
        """Everybody's parts and their sizes, by file name."""
        found: dict[str, dict[Path, int]] = {}
        for part in self.path.glob(f"*{PART}"):
            name, size = part.name.removesuffix(PART).rpartition(".")[0], _size(part)
            if size is not None:
                found.setdefault(name, {})[part] = size
        return found

    def _read(self, name: str) -> Wanted | None:
        """None for what is not there, and for what is damaged: it is fetched again."""
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=Wanted)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _write(self, name: str, wanted: Wanted) -> None:
        """Beside, then by a rename: nobody reads half of it."""
        new = self.part(name)
        with new.open("wb") as file:
            file.write(msgspec.json.encode(wanted))
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path / name)


def _takes_lock(handle: int) -> bool:
    """Whether nobody held it through another handle, also one of this process."""
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
    """Of a file's content, of the kind that `like` is."""
    with path.open("rb") as file:
        if len(like) == SHA256_DIGITS:
            return hashlib.file_digest(file, "sha256").hexdigest()
        # As git names a blob.
        head = b"blob %d\0" % os.fstat(file.fileno()).st_size
        begun = hashlib.sha1(head, usedforsecurity=False)
        return hashlib.file_digest(file, lambda: begun).hexdigest()
