"""The hand-off really happens: bytes are published, fetched and reused, and prefixes are found."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.http import Answer, complete, text_of
from tests.support.engines.tiny_models import prompt_of
from tests.support.pools.baton_up import Pool

CHUNK = 16
FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pool(tiny_model: Callable[[str], Path]) -> Iterator[Pool]:
    flags = [
        *("--model", str(tiny_model("llama-gqa4")), "--dtype", "float32", "--threads", "1"),
        *("--prefill", "2", "--decode", "2", "--chunk-blocks", "1", "--kv-blocks", "800"),
        # A model so small is computed sooner than fetched.
        *("--handoff", "always", "--fetch", "always", "--write-behind-bandwidth", "0"),
    ]
    with Pool(flags) as running:
        yield running


def test_bytes_published_fetched_and_chunks_reused_are_metrics(pool: Pool) -> None:
    before = pool.totals()
    answer = complete(pool.url, prompt_of(100, seed=21), **FIELDS)
    after = pool.totals()
    chunks = 100 // CHUNK
    for name in ("published_chunks_total", "fetched_chunks_total", "reused_chunks_total"):
        assert after[name] - before[name] == chunks, name
    chunk_bytes = pool.pool()["nodes"][0]["layout"]["chunk_bytes"]
    for name in ("published_bytes_total", "fetched_bytes_total"):
        assert after[name] - before[name] == chunks * chunk_bytes, name
    placement = answer.headers["x-baton-placement"]
    assert "prefill-" in placement
    assert "decode-" in placement
    assert answer.headers["x-baton-request-id"]


def test_the_metrics_page_names_them_per_node(pool: Pool) -> None:
    complete(pool.url, prompt_of(64, seed=22), **FIELDS)
    page = text_of(pool.url, "/metrics")
    for name in (
        "baton_kv_published_bytes_total",
        "baton_kv_fetched_bytes_total",
        "baton_kv_chunks_reused_total",
    ):
        assert f"{name}{{" in page
    assert 'node="decode-0"' in page
    assert 'node="prefill-1"' in page


@pytest.mark.parametrize("restarts", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_second_request_with_the_same_prefix_computes_only_its_tail_wherever_it_lands(
    pool: Pool, restarts: int
) -> None:
    prefix = prompt_of(500, seed=23 + restarts)
    complete(pool.url, [*prefix, 5, 6, 7], **FIELDS)
    # Once where the prefix is, then after each node that served it was killed: with other nodes, or
    # the same ones started anew and empty, only the store still has it.
    used: list[str] = []
    for tail in range(1 + restarts):
        restart(pool, used)
        before = pool.totals()["computed_prompt_tokens_total"]
        answer = complete(pool.url, [*prefix, 9, tail, 8], **FIELDS)
        computed = pool.totals()["computed_prompt_tokens_total"] - before
        # Prefill and decode each recompute at most the tail behind the last full chunk.
        assert 0 < computed <= 2 * (503 % CHUNK + CHUNK), answer.headers["x-baton-placement"]
        assert answer.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 480
        used = nodes_used(answer)


def nodes_used(answer: Answer) -> list[str]:
    """Prefill and decode node, as the placement header names them."""
    return re.findall(r"(?:prefill|decode)-\d+", answer.headers["x-baton-placement"])[:2]


def restart(pool: Pool, names: list[str]) -> None:
    """Kill these nodes and wait until they are back under other epochs."""
    old = {node["id"]: node for node in pool.pool()["nodes"]}
    for name in names:
        os.kill(old[name]["pid"], signal.SIGKILL)

    def back() -> bool:
        now = {node["id"]: node for node in pool.pool()["nodes"] if node["state"] == "ready"}
        return len(now) == len(old) and all(now[n]["epoch"] != old[n]["epoch"] for n in names)

    pool.wait(back, f"restart {names}")


def test_the_pool_says_what_each_node_is_and_holds(pool: Pool) -> None:
    state = pool.pool()
    assert [node["id"] for node in state["nodes"]] == [
        "decode-0",
        "decode-1",
        "prefill-0",
        "prefill-1",
    ]
    for node in state["nodes"]:
        assert node["state"] == "ready"
        assert node["pid"] > 0
        assert node["epoch"]
        assert node["address"].startswith("http://127.0.0.1:")
    assert len({node["fingerprint"] for node in state["nodes"]}) == 1
    assert "totals" in state
    assert "store" in state
