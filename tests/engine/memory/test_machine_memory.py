"""Free memory: the machine's, and the limits of cgroups of versions 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.memory.host_memory import MemoryGroup, free_bytes, free_memory, read_groups

SIZES = st.integers(0, 1 << 50)
GROUPS = st.lists(st.builds(MemoryGroup, SIZES, SIZES, SIZES), max_size=4)
NO_LIMIT = (1 << 63) - 4096  # the value of cgroup v1 for no limit


def machine(root: Path, available_kib: int | None, files: dict[str, str]) -> Path:
    """A folder that looks like the root folder, with /proc/meminfo and `files`."""
    lines = ["MemTotal:       999999999 kB", "MemFree:        1 kB"]
    if available_kib is not None:
        lines.append(f"MemAvailable:   {available_kib} kB")
    for name, text in {"proc/meminfo": "\n".join(lines), **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def v2(group: str, limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup{group}"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7",
    }


def v1(group: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    folder = f"sys/fs/cgroup/memory{group}"
    return {
        f"{folder}/memory.limit_in_bytes": str(limit),
        f"{folder}/memory.usage_in_bytes": str(used),
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}",
    }


def test_without_cgroups_free_memory_is_the_machines_available_memory(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path, 4096, {})) == 4 << 20


def test_free_memory_is_unknown_without_meminfo(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    assert free_memory(machine(tmp_path, None, {})) is None


def test_reclaimable_pages_of_a_container_count_as_free(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", **v2("", "3000000", 2000000, inactive=500000)}
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 1500000


def test_the_tightest_limit_of_a_cgroup_and_its_parents_applies(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a.slice/b.scope",
        **v2("/a.slice/b.scope", "max", 10),
        **v2("/a.slice", "5000", 1000),
    }
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 4000
    assert read_groups(tmp_path) == [MemoryGroup(5000, 1000, 0)]


def test_cgroups_of_version_1_are_read(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpuset:/\n4:cpu,memory:/docker/c0\n0::/",
        **v1("/docker/c0", 9000, 4000, inactive=100),
        **v1("", NO_LIMIT, 123456),
    }
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 5100


def test_a_container_whose_cgroup_is_mounted_at_the_top_is_found(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/docker/c0", **v1("", 9000, 4000)}
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 5000


@pytest.mark.parametrize("used", [100, 5000])
def test_a_cgroup_at_or_over_its_limit_has_no_free_memory(used: int) -> None:
    assert MemoryGroup(100, used).free == 0


@given(SIZES, GROUPS)
def test_free_memory_never_exceeds_the_machines_or_any_cgroups(
    available: int, groups: list[MemoryGroup]
) -> None:
    free = free_bytes(available, groups)
    assert 0 <= free <= available
    assert all(free <= group.limit for group in groups)
    assert free in {available, *(group.free for group in groups)}


def test_the_free_memory_of_this_machine_is_plausible() -> None:
    free = free_memory()
    assert free is None or free > 1 << 20
