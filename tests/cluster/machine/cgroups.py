"""Control groups of a cluster's nodes, created before a kubelet starts and removed after it ends.

In: a group's name. Out: that group in every mounted hierarchy (one per controller in version 1, a
single one in version 2).
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
REMOVE_S = 60.0


def hierarchies() -> list[Path]:
    if (ROOT / "cgroup.controllers").exists():
        return [ROOT]
    return [path for path in sorted(ROOT.iterdir()) if path.is_dir() and not path.is_symlink()]


def make_group(name: str) -> None:
    for hierarchy in hierarchies():
        group = hierarchy / name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            # Version 1 does not inherit them, and admits no process while they are empty.
            if hierarchy != ROOT and (hierarchy / file).exists():
                (group / file).write_text((hierarchy / file).read_text())
        if (group / "cgroup.subtree_control").exists():
            for above in (hierarchy, group):
                available = (above / "cgroup.controllers").read_text().split()
                enabled = " ".join(f"+{controller}" for controller in available)
                (above / "cgroup.subtree_control").write_text(enabled)


def groups(prefix: str) -> list[Path]:
    """The groups whose names begin with `prefix`, in each hierarchy."""
    return [path for one in hierarchies() for path in sorted(one.glob(f"{prefix}*"))]


def members(prefix: str) -> list[psutil.Process]:
    """The processes in groups with this prefix, and in their subgroups."""
    pids = set()
    for group in groups(prefix):
        for file in group.rglob("cgroup.procs"):
            with suppress(OSError):
                pids |= {int(pid) for pid in file.read_text().split()}
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    return processes


def remove_groups(prefix: str) -> None:
    """Remove the groups. Retry, because the kernel releases dead processes a moment later."""
    deadline = time.monotonic() + REMOVE_S
    for group in groups(prefix):
        inner = [path for path in group.rglob("*") if path.is_dir()]
        for path in [*sorted(inner, reverse=True), group]:
            while True:
                try:
                    path.rmdir()
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.05)
