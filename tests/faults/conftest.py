"""Pools that the fault tests of one file share; repaired after each test, not restarted. The one
that nobody disturbs is for all files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pools.processes import SIM, Cluster

# Slow enough that a fault's moment lies between two steps, not between two lines of code.
SLOW_PREFILL = ("--sim-prefill-ms-per-token=1", "--max-batched-tokens=32")
SLOW_DECODE = ("--sim-decode-ms=10", "--overlap=on")
# Shorter than a stream: what a node that ends still has is moved.
HASTY = "--drain-timeout=0.05"
# What a table's row waits for when only an engine stands still.
STALL = "--stall-timeout=4"
TORCH_MODEL = "llama-gqa4"


@pytest.fixture(scope="session")
def calm() -> Iterator[Cluster]:
    """Undisturbed, alone and fast: one node without a store gives the reference answers."""
    with Cluster(0, 1, flags=[*SIM, "--kv-blocks=4000"], store=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool() -> Iterator[Cluster]:
    """Two nodes of each role, always with a hand-off."""
    cluster = Cluster(
        *(2, 2),
        prefill_flags=[*SLOW_PREFILL, HASTY],
        decode_flags=[*SLOW_DECODE, HASTY],
        router_flags=["--handoff=always", STALL],
    )
    with cluster:
        yield cluster


@pytest.fixture(scope="session")
def torch_folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model(TORCH_MODEL)


@pytest.fixture(scope="module")
def torch_flags(torch_folder: Path) -> list[str]:
    return [
        *("--model", str(torch_folder), "--dtype", "float32", "--threads", "1"),
        *("--chunk-blocks", "1", "--kv-blocks", "400"),
    ]


@pytest.fixture(scope="module")
def torch_calm(torch_flags: list[str]) -> Iterator[Cluster]:
    with Cluster(0, 1, flags=torch_flags, store=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def torch_pool(torch_flags: list[str]) -> Iterator[Cluster]:
    cluster = Cluster(
        *(1, 2),
        flags=torch_flags,
        prefill_flags=["--max-batched-tokens=32"],
        decode_flags=[HASTY],
        router_flags=["--handoff=always", STALL],
    )
    with cluster:
        yield cluster
