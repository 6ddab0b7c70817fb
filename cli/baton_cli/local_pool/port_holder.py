"""Which process listens on a TCP port of this machine, from /proc.

In: a port. Out: a pid and a command, None if nobody listens or this user may not see the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from baton_engine.memory.host_memory import ROOT

LISTENS = "0A"  # the state in /proc/net/tcp
LONGEST = 80


@dataclass(frozen=True, slots=True)
class PortHolder:
    pid: int
    command: str

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.command})"


def port_holder(port: int, root: Path = ROOT) -> PortHolder | None:
    sockets = {f"socket:[{inode}]" for inode in _inodes(port, root)}
    if not sockets:
        return None
    for folder in (root / "proc").glob("[0-9]*"):
        # A process that has ended, or belongs to another user, cannot be read.
        with suppress(OSError):
            if not sockets.isdisjoint(_open_files(folder / "fd")):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                text = b" ".join(words).decode(errors="replace").strip()
                return PortHolder(int(folder.name), text[:LONGEST] or "unknown")
    return None


def _open_files(folder: Path) -> Iterator[str]:
    for link in folder.iterdir():
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(link)


def _inodes(port: int, root: Path) -> Iterator[str]:
    """The inodes of the sockets that listen on the port."""
    for name in ("tcp", "tcp6"):
        try:
            lines = (root / "proc/net" / name).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            parts = line.split()
            if parts[3] == LISTENS and int(parts[1].rpartition(":")[2], 16) == port:
                yield parts[9]
