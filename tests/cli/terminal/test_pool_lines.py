"""A snapshot of a pool as lines: figures, orders, and what a viewer may not see."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_cli.terminal.pool_lines import ORDERS, pool_lines
from baton_router.live.records import (
    Latency,
    LiveNode,
    PlannerDecision,
    RunningCall,
    Snapshot,
    TenantCalls,
    Totals,
    Viewer,
)


def call(name: str, **fields: Any) -> RunningCall:
    values: dict[str, Any] = {
        "id": name,
        "tenant": "acme",
        "endpoint": "chat",
        "phase": "running",
        "age_ms": 1500.0,
        "prompt_tokens": 40,
        "cached_tokens": 16,
        "completion_tokens": 7,
        "prefill": None,
        "decode": "decode-0",
        "attempts": 1,
    }
    return RunningCall(**(values | fields))


NODES = [
    LiveNode(
        id="decode-0",
        role="decode",
        state="ready",
        exact="bitwise",
        running=2,
        waiting=1,
        free_blocks=75,
        cached_blocks=50,
        total_blocks=100,
        tokens_per_s=123.45,
        kv_in_bytes_per_s=2.5e6,
        kv_out_bytes_per_s=0.0,
    ),
    LiveNode(id="prefill-0", role="prefill", state="draining", reason="scale-down"),
]
SNAPSHOT = Snapshot(
    at_ms=0,
    pool="default",
    router="router-1",
    model="demo",
    viewer=Viewer("", admin=True),
    totals=Totals(running=2, waiting=1, requests_per_s=3.0, ready_nodes=1, nodes=2),
    latency=Latency(ttft_p50_ms=34.6, cache_hit_rate=0.25),
    nodes=NODES,
    flows=[],
    requests=[
        call("older", tenant="globex", age_ms=9000.0),
        call("younger", prompt_tokens=4000, completion_tokens=0),
    ],
    requests_left_out=3,
    ended=[],
    tenants=[TenantCalls("acme", 1, 0), TenantCalls("globex", 1, 1)],
    decisions=[PlannerDecision(0, 1, 2, "DemandRose")],
)


def test_the_lines_have_totals_nodes_requests_and_tenants() -> None:
    assert [line.text for line in pool_lines(SNAPSHOT, ORDERS["a"])] == [
        "pool default, demo, router router-1, 00:00:00 UTC",
        "nodes: 1 of 2 ready; requests: 2 running, 1 waiting, 3.0/s; errors: -/s",
        "tokens: -/s; prompt tokens: -/s, cached 25%",
        "first token: p50 35 ms, p99 -; between tokens: p50 -, p99 -",
        "planner: 1 prefill, 2 decode: DemandRose",
        "",
        "NODE       ROLE     STATE                  EXACT    RUN  WAIT  KV USED  CACHED  TOKENS/S"
        "  KV IN/S  KV OUT/S",
        "prefill-0  prefill  draining (scale-down)  -          -     -        -       -         -"
        "        -         -",
        "decode-0   decode   ready                  bitwise    2     1      25%     50%     123.5"
        "   2.5 MB       0 B",
        "",
        "TENANT  ENDPOINT  PHASE    PREFILL  DECODE      AGE  PROMPT  CACHED  NEW  TRIES       ID",
        "globex  chat      running  -        decode-0  9.0 s      40      16    7      1    older",
        "acme    chat      running  -        decode-0  1.5 s    4000      16    0      1  younger",
        "and 3 more requests",
        "",
        "TENANT  RUN  WAIT",
        "acme      1     0",
        "globex    1     1",
    ]


@pytest.mark.parametrize(
    ("key", "reverse", "first"),
    [
        ("a", False, "older"),
        ("a", True, "younger"),
        ("p", False, "younger"),
        ("n", False, "older"),
        ("t", False, "younger"),
        ("t", True, "older"),
    ],
)
def test_a_key_orders_the_requests(key: str, reverse: bool, first: str) -> None:
    lines = [line.text for line in pool_lines(SNAPSHOT, ORDERS[key], reverse)]
    [head] = [place for place, line in enumerate(lines) if line.endswith("  ID")]
    assert lines[head + 1].endswith(f" {first}")


def test_an_idle_pool_without_keys_shows_its_nodes_alone() -> None:
    idle = msgspec.structs.replace(
        SNAPSHOT, requests=[], requests_left_out=0, tenants=[TenantCalls("", 0, 0)]
    )
    headings = [line.text.split()[0] for line in pool_lines(idle, ORDERS["a"]) if line.heading]
    assert headings == ["NODE"]


def test_names_with_escape_codes_are_shown_escaped() -> None:
    bad = "\x1b]0;owned\x07\n"
    hostile = msgspec.structs.replace(
        SNAPSHOT,
        pool=bad,
        model=bad,
        nodes=[msgspec.structs.replace(NODES[0], id=bad, reason=bad)],
        requests=[call(bad, tenant=bad, endpoint=bad)],
        tenants=[TenantCalls(bad, 1, 0)],
        decisions=[PlannerDecision(0, 1, 2, bad)],
    )
    text = "".join(line.text for line in pool_lines(hostile, ORDERS["a"]))
    assert text.isprintable()
    assert text.count(r"\x1b]0;owned\x07\n") == 9
