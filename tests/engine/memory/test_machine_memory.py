"""How much memory is left: the machine's, and the limits of control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_engine.memory.host_memory import MemoryGroup, free_bytes, free_memory, read_groups

SIZES = st.integers(0, 1 << 50)
GROUPS = st.lists(st.builds(MemoryGroup, SIZES, SIZES, SIZES), max_size=4)
NO_LIMIT = (1 << 63) - 4096  # what version 1 says where there is none


def machine(root: Path, available_kib: int | None, files: dict[str, str]) -> Path:
    """A folder that looks like / to whoever asks for memory."""
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


def test_without_groups_it_is_what_the_machine_has_available(tmp_path: Path) -> None:
    assert free_memory(machine(tmp_path, 4096, {})) == 4 << 20


def test_a_machine_that_does_not_say_is_no_machine_without_memory(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    assert free_memory(machine(tmp_path, None, {})) is None


def test_a_container_s_limit_counts_without_what_can_be_reclaimed(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/", **v2("", "3000000", 2000000, inactive=500000)}
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 1500000


def test_the_tightest_group_above_decides(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a.slice/b.scope",
        **v2("/a.slice/b.scope", "max", 10),
        **v2("/a.slice", "5000", 1000),
    }
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 4000
    assert read_groups(tmp_path) == [MemoryGroup(5000, 1000, 0)]


def test_groups_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpuset:/\n4:cpu,memory:/docker/c0\n0::/",
        **v1("/docker/c0", 9000, 4000, inactive=100),
        **v1("", NO_LIMIT, 123456),
    }
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 5100


def test_a_container_that_sees_itself_as_the_top_is_found_there(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "4:memory:/docker/c0", **v1("", 9000, 4000)}
    assert free_memory(machine(tmp_path, 1 << 30, files)) == 5000


@pytest.mark.parametrize("used", [100, 5000])
def test_a_group_that_is_over_its_limit_has_nothing_left(used: int) -> None:
    assert MemoryGroup(100, used).free == 0


@given(SIZES, GROUPS)
def test_nobody_gets_more_than_the_machine_or_any_group_has(
    available: int, groups: list[MemoryGroup]
) -> None:
    free = free_bytes(available, groups)
    assert 0 <= free <= available
    assert all(free <= group.limit for group in groups)
    assert free in {available, *(group.free for group in groups)}


def test_this_machine_says_something_sensible() -> None:
    free = free_memory()
    assert free is None or free > 1 << 20
