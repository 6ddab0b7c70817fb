"""Memory that this process may still allocate: the machine's, and the limits of its cgroups.

In: /proc and /sys/fs/cgroup (versions 1 and 2), or a test's folder in the same form. Out: bytes.
/proc/meminfo describes the whole machine, so a container's limit is only in its cgroup. The limits
of all visible parent cgroups count, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton_engine.errors import SettingsError

GIB = 1 << 30
ROOT = Path("/")
CGROUPS = "sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One control group, in bytes. `reclaimable` is the part of `used` that the kernel frees on
    demand: inactive pages of the file cache."""

    limit: int
    used: int
    reclaimable: int = 0

    @property
    def free(self) -> int:
        return max(0, self.limit - max(0, self.used - self.reclaimable))


def free_bytes(available: int, groups: Sequence[MemoryGroup]) -> int:
    """The minimum of the machine's available bytes and each group's free bytes."""
    return min([available, *(group.free for group in groups)])


def check_asked(asked: Mapping[str, int], free: int | None) -> None:
    """Raise SettingsError if the bytes asked for, by flag, exceed the free bytes. Checks nothing if
    `free` is None (unknown)."""
    asked = {flag: size for flag, size in asked.items() if size}
    if free is not None and sum(asked.values()) > free:
        parts = " + ".join(f"{flag} {size / GIB:.2f} GiB" for flag, size in asked.items())
        raise SettingsError(
            f"{parts} cannot fit: {free / GIB:.2f} GiB of memory are free here; lower"
            f" {' or '.join(asked)}, or start it all the same with --overcommit"
        )


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes that can be allocated now without swapping; None if the machine does not report it."""
    for line in _text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return free_bytes(int(value.split()[0]) << 10, read_groups(root))
    return None


def read_groups(root: Path = ROOT) -> list[MemoryGroup]:
    """The cgroups of this process that have a limit, its own first. A container may see its own
    group as the root of the tree, whatever path /proc gives, so missing folders are skipped."""
    return list(_groups(root))


def _groups(root: Path) -> Iterator[MemoryGroup]:
    tree = root / CGROUPS
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for folder in _upwards(tree, path):
                yield from _group(
                    folder, "memory.max", "memory.current", "memory.stat", "inactive_file"
                )
        elif "memory" in controllers.split(","):
            for folder in _upwards(tree / "memory", path):
                yield from _group(
                    *(folder, "memory.limit_in_bytes", "memory.usage_in_bytes"),
                    *("memory.stat", "total_inactive_file"),
                )


def _upwards(top: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it, up to the top of the tree."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for count in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:count])


def _group(
    folder: Path, limit_name: str, used_name: str, stat_name: str, reclaimable_name: str
) -> Iterator[MemoryGroup]:
    """Yield the group, or nothing if it has no limit ("max", or no such file)."""
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or used is None:
        return
    stat = dict(line.partition(" ")[::2] for line in _text(folder / stat_name).splitlines())
    yield MemoryGroup(limit, used, int(stat.get(reclaimable_name, "0")))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """The file's text, or "" if it cannot be read: kernels and containers differ in their files."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
