"""Large bodies sent to a router process: its peak memory, and the memory that it keeps.

`make test` sends four bodies at once of each QUICK kind; `make test-long` four and 16 of every
kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.http import complete, exchange
from tests.support.pools.processes import SIM, Cluster
from tests.support.waiting import until

pytestmark = pytest.mark.integration

BODY_BYTES = 15_600_000
MIB = 1 << 20
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SENTENCE = "one body of a client that requests too much. "


def text(size: int) -> str:
    return (SENTENCE * (size // len(SENTENCE) + 1))[:size]


KINDS: dict[str, tuple[str, Callable[[], Any], set[tuple[int, str]]]] = {
    "a text": (
        COMPLETIONS,
        lambda: {"prompt": text(BODY_BYTES)},
        {(400, "context_length_exceeded")},
    ),
    "texts": (
        COMPLETIONS,
        lambda: {"prompt": [text(30_000)] * (BODY_BYTES // 30_000)},
        {(400, "context_length_exceeded")},
    ),
    "a conversation": (
        CHAT,
        lambda: {"messages": [{"role": "user", "content": text(BODY_BYTES)}]},
        {(400, "context_length_exceeded")},
    ),
    "other characters": (
        COMPLETIONS,
        lambda: {"prompt": "\u4e16" * (BODY_BYTES // 3)},
        {(400, "context_length_exceeded")},
    ),
    "ids": (
        COMPLETIONS,
        lambda: {"prompt": [200] * (BODY_BYTES // 4)},
        {(413, "request_too_large")},
    ),
    "objects": (
        COMPLETIONS,
        lambda: {"prompt": "x", "unknown": [{}] * (BODY_BYTES // 3)},
        {(413, "request_too_large")},
    ),
}


# One body that is tokenized, and one that is refused while it is parsed.
QUICK = ("a text", "ids")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # A long queue timeout: no request is refused for waiting, even on a slow machine.
    with Cluster(0, 1, flags=SIM, store=False, router_flags=("--queue-timeout=600",)) as cluster:
        yield cluster


def memory(cluster: Cluster, name: str) -> int:
    for line in Path(f"/proc/{cluster.router.pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


async def check(cluster: Cluster, kind: str, clients: int, limit: int) -> None:
    path, make, expected = KINDS[kind]
    data = json.dumps(make(), separators=(",", ":"), ensure_ascii=False).encode()
    complete(cluster.url, "warm", max_tokens=1)
    before = memory(cluster, "VmRSS")
    Path(f"/proc/{cluster.router.pid}/clear_refs").write_text("5")
    with ThreadPoolExecutor(clients) as senders:
        answers = list(senders.map(lambda _: exchange(cluster.url, path, data), range(clients)))
    assert {(answer.status, answer.body["error"]["code"]) for answer in answers} == expected
    assert memory(cluster, "VmHWM") - before < limit
    await until(lambda: memory(cluster, "VmRSS") - before < 64 * MIB)
    assert complete(cluster.url, "after", max_tokens=1)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.long) for kind in KINDS],
)
async def test_four_large_bodies_at_once_stay_within_the_peak_and_free_their_memory(
    cluster: Cluster, kind: str
) -> None:
    await check(cluster, kind, 4, 256 * MIB)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
async def test_sixteen_large_bodies_at_once_stay_within_the_same_peak(
    cluster: Cluster, kind: str
) -> None:
    await check(cluster, kind, 16, 256 * MIB)
