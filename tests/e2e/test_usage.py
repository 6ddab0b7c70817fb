"""The books of a pool with two routers, of whose processes some are killed."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.clients.http import Json, exchange
from tests.support.pools.books import await_books, books, rows_by
from tests.support.pools.processes import Cluster

pytestmark = pytest.mark.integration

SIM = (
    *("--engine=sim", "--chunk-blocks=1", "--kv-blocks=400", "--max-model-len=2048"),
    *("--sim-decode-ms=10", "--sim-prefill-ms-per-token=0.1"),
)
KEYS = {"a": "key-of-a", "b": "key-of-b", "boss": "key-of-boss"}
TOKENS = 60
LOST_S = 10.0  # the last second of a killed process, on a busy machine


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Cluster]:
    path = tmp_path / "keys"
    path.write_text(
        "".join(f"{name} {key}{' admin' * (name == 'boss')}\n" for name, key in KEYS.items())
    )
    cluster = Cluster(
        *(1, 2),
        flags=SIM,
        router_flags=[f"--api-keys={path}"],
        routers=2,
        asking=bearer("boss"),
    )
    with cluster:
        second = cluster.routers[1].url
        cluster.wait(lambda: nodes_of(second) == {"ready": 3}, "connect the second router")
        yield cluster


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def nodes_of(url: str) -> Counter[str]:
    try:
        answer = exchange(url, "/pool", headers=bearer("boss"))
    except OSError:  # the router does not listen yet
        return Counter()
    return Counter(node["state"] for node in answer.body["nodes"])


def complete(url: str, tenant: str, number: int) -> Json:
    body = {
        "prompt": [32 + (number * 7 + i) % 90 for i in range(150 + number)],
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    answer = exchange(url, "/v1/completions", body, bearer(tenant))
    assert answer.status == 200, answer.body
    usage: Json = answer.body["usage"]
    return usage


def test_the_books_balance_and_keep_all_when_nodes_and_a_router_are_killed(pool: Cluster) -> None:
    first, second = (router.url for router in pool.routers)
    began = time.monotonic()
    with ThreadPoolExecutor(12) as threads:
        calls = [
            (tenant, threads.submit(complete, url, tenant, number))
            for number in range(4)
            for url in (first, second)
            for tenant in ("a", "b")
        ]
        pool.wait(lambda: totals(pool, "running") > 4, "run requests on decode nodes")
        time.sleep(0.2)
        pool.nodes["decode-0"].kill()
        used = {tenant: Counter[str]() for tenant in ("a", "b")}
        for tenant, call in calls:
            usage = call.result()
            used[tenant].update(
                {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
            )
    took_s = time.monotonic() - began

    key = KEYS["boss"]
    await_books(lambda: sum(r["calls"] for r in books(second, key=key)["rows"]) == 16, "all count")
    pool.routers[0].kill()
    tenants = rows_by(second, "tenant", key)
    for tenant, tokens in used.items():
        assert tenants[tenant]["calls"] == 8
        assert {name: tenants[tenant][name] for name in tokens} == tokens
        assert tenants[tenant]["busy_ms"] > 0
    causes = rows_by(second, "cause", key)
    assert all(causes[cause]["busy_ms"] > 0 for cause in ("prefill", "decode", "lost")), causes
    assert "evicted" not in causes

    # Each node has the time for which it lived, the killed one as far as it has written it.
    nodes = rows_by(second, "node", key)
    for name in pool.nodes:
        node_s = (nodes[name]["busy_ms"] + nodes[name]["idle_ms"]) / 1000
        alive_s = took_s - LOST_S if name == "decode-0" else took_s - 2
        assert node_s > alive_s, name

    # A tenant sees itself alone.
    mine = books(second, key=KEYS["a"])
    assert [row["tenant"] for row in mine["rows"]] == ["a"]
    assert mine["rows"][0]["completion_tokens"] == used["a"]["completion_tokens"]
    assert "wall_ms" not in mine

    done = subprocess.run(
        [sys.executable, "-m", "baton_cli", "usage", "--url", second, "--by=tenant,model", "--csv"],
        env=os.environ | {"BATON_API_KEY": key},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    table = list(csv.DictReader(io.StringIO(done.stdout)))
    assert sum(int(row["completion_tokens"]) for row in table) == 16 * TOKENS


def totals(pool: Cluster, name: str) -> float:
    total: float = pool.pool()["totals"][name]
    return total
