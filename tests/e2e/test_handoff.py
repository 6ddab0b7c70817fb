"""Hand-offs in a real pool: chunks are published, fetched and reused, and metrics count them.

The nodes have the simulated engine, whose blocks and KV are real; test_exactness checks the
hand-offs of models on torch."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.clients.http import Answer, complete, exchange, text_of
from tests.support.engines.tiny_models import prompt_of as ids_of
from tests.support.pools.baton_up import Pool

CHUNK = 16
FIELDS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def prompt_of(length: int, *, seed: int) -> list[int]:
    """Ids that are also in the byte tokenizer's vocabulary."""
    return [token % 250 for token in ids_of(length, seed=seed)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    flags = [
        *("--engine", "sim", "--prefill", "2", "--decode", "2"),
        *("--chunk-blocks", "1", "--kv-blocks", "800"),
        # Computing takes the simulated engine no time.
        *("--handoff", "always", "--fetch", "always", "--write-behind-bandwidth", "0"),
    ]
    with Pool(flags) as pool:
        yield pool


def test_totals_count_published_fetched_and_reused_chunks_and_bytes(pool: Pool) -> None:
    before = pool.totals()
    response = complete(pool.url, prompt_of(100, seed=21), **FIELDS)
    after = pool.totals()
    chunks = 100 // CHUNK
    for name in ("published_chunks_total", "fetched_chunks_total", "reused_chunks_total"):
        assert after[name] - before[name] == chunks, name
    chunk_bytes = pool.pool()["nodes"][0]["layout"]["chunk_bytes"]
    for name in ("published_bytes_total", "fetched_bytes_total"):
        assert after[name] - before[name] == chunks * chunk_bytes, name
    placement = response.headers["x-baton-placement"]
    assert "prefill-" in placement
    assert "decode-" in placement
    assert response.headers["x-baton-request-id"]
    assert response.headers["x-baton-exact"] == "bitwise"


def test_the_metrics_page_has_the_hand_off_counters_per_node(pool: Pool) -> None:
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
def test_a_second_request_computes_only_the_tail_after_the_shared_prefix_on_any_node(
    pool: Pool, restarts: int
) -> None:
    prefix = prompt_of(500, seed=23 + restarts)
    complete(pool.url, [*prefix, 5, 6, 7], **FIELDS)
    # The first request runs while nodes have the prefix. Before each further one, the test kills
    # the nodes that served the last request, so only the store has the prefix.
    used: list[str] = []
    for tail in range(1 + restarts):
        restart(pool, used)
        before = pool.totals()["computed_prompt_tokens_total"]
        response = complete(pool.url, [*prefix, 9, tail, 8], **FIELDS)
        computed = pool.totals()["computed_prompt_tokens_total"] - before
        # Prefill and decode each compute at most the tail after the last full chunk.
        assert 0 < computed <= 2 * (503 % CHUNK + CHUNK), response.headers["x-baton-placement"]
        assert response.body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 480
        used = nodes_used(response)


def nodes_used(response: Answer) -> list[str]:
    """The prefill and the decode node in the placement header."""
    return re.findall(r"(?:prefill|decode)-\d+", response.headers["x-baton-placement"])[:2]


def restart(pool: Pool, names: list[str]) -> None:
    """Kill these nodes and wait until they are ready with new epochs."""
    old = {node["id"]: node for node in pool.pool()["nodes"]}
    for name in names:
        os.kill(old[name]["pid"], signal.SIGKILL)

    def restarted() -> bool:
        now = {node["id"]: node for node in pool.pool()["nodes"] if node["state"] == "ready"}
        return len(now) == len(old) and all(now[n]["epoch"] != old[n]["epoch"] for n in names)

    pool.wait(restarted, f"restart {names}")


def test_the_pool_endpoint_reports_the_state_of_each_node(pool: Pool) -> None:
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


def test_a_reset_clears_the_nodes_caches_and_a_request_may_skip_all_caches(pool: Pool) -> None:
    prompt = prompt_of(100, seed=41)
    names = ("cached_prompt_tokens_total", "fetched_chunks_total")
    answers, counts = [], []

    def send(**fields: object) -> None:
        before = pool.totals()
        answers.append(complete(pool.url, prompt, **FIELDS, **fields))
        after = pool.totals()
        counts.append([after[name] - before[name] for name in names])

    send()
    send()
    assert counts[1][0] > 0
    reset = exchange(pool.url, "/reset_prefix_cache", {})
    assert (reset.status, reset.body["success"]) == (200, True)
    assert len(reset.body["nodes"]) == 4
    send()
    assert counts[2][0] == 0
    assert counts[2][1] > 0  # from the store
    send(skip_reading_prefix_cache=True)
    assert counts[3] == [0, 0]
    assert "reason=no_cache" in answers[3].headers["x-baton-placement"]
    assert len({str(answer.body["choices"]) for answer in answers}) == 1
