"""Image layers copied from this machine: programs, and all libraries that they load.

In: files and folders of this machine. Out: a tar file with the same absolute paths (or paths
relative to another root), in which all files are readable by everyone and owned by root.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# Commands for shell scripts in pods.
BASICS = ("sh", "cat", "date", "echo", "env", "head", "id", "ls", "mkdir", "rm", "sleep", "true")
_LIBRARY = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
_MISSING = re.compile(r"^\s+(\S+) => not found", re.MULTILINE)
# Folders that are links below /usr, as in Debian since version 12.
_MERGED = ("bin", "lib", "lib64", "sbin")


class Layer:
    """`with Layer(path) as layer:` and then `add_...`. A path is added only once."""

    def __init__(self, path: Path, root: Path = Path("/")) -> None:
        """Paths below `root` are relative to / in the image."""
        self._tar = tarfile.TarFile(path, "w", format=tarfile.PAX_FORMAT)
        self._root = root
        self._there: set[str] = set()
        self._programs: list[Path] = []

    def __enter__(self) -> Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def add(self, path: Path, at: str = "") -> None:
        """Add one file or link."""
        name = _merged(at or self._place(path))
        if name in self._there:
            return
        self._there.add(name)
        self._tar.add(path, name, recursive=False, filter=_for_everybody)
        if path.is_file() and not path.is_symlink() and _is_elf(path):
            self._programs.append(path)

    def add_copy(self, path: Path) -> None:
        """Add a file under this name, even if the path is a link on this machine."""
        self.add(path.resolve(), self._place(path))

    def add_text(self, name: str, content: str) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content.encode())
        self._tar.addfile(info, io.BytesIO(content.encode()))

    def add_base(self) -> None:
        """Add the base of any image: users, name look-up, certificates, the commands of BASICS."""
        for name in _MERGED:
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            self._tar.addfile(link)
        scratch = tarfile.TarInfo("tmp")
        scratch.type, scratch.mode = tarfile.DIRTYPE, 0o1777
        self._tar.addfile(scratch)
        self.add_text("etc/passwd", "root:x:0:0::/:/bin/sh\n")
        self.add_text("etc/group", "root:x:0:\n")
        self.add_text("etc/nsswitch.conf", "hosts: files dns\n")
        for path in (Path("/etc/ld.so.cache"), CERTIFICATES):
            self.add_copy(path)
        for name in BASICS:
            path = Path("/usr/bin") / name
            self.add(path.resolve(), f"usr/bin/{name}")

    def add_libraries(self, folders: Iterable[Path] = ()) -> None:
        """Add all libraries that the files added so far load. `folders` are searched first."""
        search = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
        done = subprocess.run(
            ["ldd", *map(str, self._programs)],
            env={**os.environ, **search},
            capture_output=True,
            text=True,
        )
        missing = set(_MISSING.findall(done.stdout))
        assert not missing, f"libraries that are not on this machine: {sorted(missing)}"
        for path in sorted({Path(path) for path in _LIBRARY.findall(done.stdout)}):
            self.add_copy(path)

    def _place(self, path: Path) -> str:
        base = self._root if path.is_relative_to(self._root) else Path("/")
        return str(path.relative_to(base))


def _merged(name: str) -> str:
    parts = PurePosixPath(name.lstrip("/")).parts
    return "/".join(("usr", *parts) if parts[0] in _MERGED else parts)


def _for_everybody(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = int(info.mtime)  # a fraction would need an extra header block per file
    info.mode |= 0o555 if info.mode & 0o100 else 0o444
    return info


def _is_elf(path: Path) -> bool:
    if path.suffix != ".so" and ".so." not in path.name and not os.access(path, os.X_OK):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"
