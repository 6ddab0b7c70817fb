"""In a running pool, only the torch engine's processes load torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.fork_server import EXECUTE
from tests.support.pools.baton_up import Pool


def with_torch(pool: Pool) -> list[psutil.Process]:
    """The pool's processes that have torch's library in their memory map."""
    return [
        one
        for one in pool.processes()
        if any("libtorch" in Path(area.path).name for area in one.memory_maps())
    ]


@pytest.mark.integration
def test_no_process_of_a_simulated_pool_loads_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXECUTE, "1")
    with Pool(["--engine", "sim", "--prefill", "1", "--decode", "1"]) as pool:
        # up, router, 2 node servers, 2 engines, and the store's processes
        assert len(pool.processes()) >= 6
        assert with_torch(pool) == []


@pytest.mark.long
def test_only_the_engine_processes_of_a_pool_load_torch(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXECUTE, "1")
    flags = ["--model", str(tiny_model("llama-gqa1")), "--kv-blocks", "64", "--threads", "1"]
    with Pool([*flags, "--prefill", "1", "--decode", "1"]) as pool:
        servers = {node["pid"] for node in pool.pool()["nodes"]}
        engines = with_torch(pool)
        assert len(engines) == 2
        assert {one.ppid() for one in engines} == servers
