"""A fetched model's folder on disk: what is complete, what is under way, who works on it.

    ORG--NAME/model.safetensors        complete, of the right size
    ORG--NAME/model.safetensors.part   its first bytes
    ORG--NAME/.fetching.json           what is wanted: the commit, names and sizes
    ORG--NAME/.fetched.json            the same, written last: all of it is there
    .ORG--NAME.lock                    locked by the one process that fetches

In: what the hub says is to be there. Out: a folder that is complete or can be resumed, whenever its
process was killed. Other processes, also of other machines that share the folder, see how far it
is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

MARKER = ".fetched.json"
PLAN = ".fetching.json"
PART = ".part"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder is to hold: the hub's commit, and bytes by file name."""

    commit: str
    files: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True)
class Fetched:
    """`path` is the model's folder."""

    path: Path

    def complete(self) -> Wanted | None:
        """What was fetched, if all of it is here."""
        wanted = self._read(MARKER)
        if wanted is not None and all(_size(self.path / n) == s for n, s in wanted.files.items()):
            return wanted
        return None

    def progress(self) -> tuple[int, int]:
        """Bytes here and bytes wanted; (0, 0) while nobody knows."""
        wanted = self._read(PLAN) or self._read(MARKER)
        if wanted is None:
            return 0, 0
        return sum(self.have(name) for name in wanted.files), wanted.bytes

    def have(self, name: str) -> int:
        """Bytes of one file that are here."""
        whole = _size(self.path / name)
        return self.part(name) if whole is None else whole

    def part(self, name: str) -> int:
        return _size(self.path / (name + PART)) or 0

    def begin(self, wanted: Wanted) -> None:
        """Keep what is here of this very commit, drop what is of another."""
        self.path.mkdir(parents=True, exist_ok=True)
        before = self._read(PLAN) or self._read(MARKER)
        if before is None or before.commit != wanted.commit:
            for name in {*wanted.files, *(before.files if before is not None else ())}:
                self.drop(name)
        for name, size in wanted.files.items():
            if _size(self.path / name) not in (None, size) or self.part(name) > size:
                self.drop(name)
        (self.path / MARKER).unlink(missing_ok=True)
        self._write(PLAN, wanted)

    def drop(self, name: str) -> None:
        for one in (name, name + PART):
            (self.path / one).unlink(missing_ok=True)

    def settle(self, name: str) -> None:
        """A file's last byte is here: from now on it has its name."""
        part = self.path / (name + PART)
        with part.open("ab") as file:
            os.fsync(file.fileno())
        part.rename(self.path / name)

    def finish(self, wanted: Wanted) -> None:
        self._write(MARKER, wanted)
        (self.path / PLAN).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process may fetch now; not, while another one holds the lock. The kernel
        frees it when its process ends, however."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        place = self.path.with_name(f".{self.path.name}.lock")
        handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(handle)

    def _read(self, name: str) -> Wanted | None:
        """None for what is not there, and for what is damaged: it is fetched again."""
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=Wanted)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _write(self, name: str, wanted: Wanted) -> None:
        """Beside, then by a rename: nobody reads half of it."""
        new = self.path / (name + PART)
        with new.open("wb") as file:
            file.write(msgspec.json.encode(wanted))
            file.flush()
            os.fsync(file.fileno())
        new.rename(self.path / name)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
