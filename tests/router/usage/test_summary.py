"""Entries of days, nodes and routers become the rows that a query asks for, with their costs."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_protocol.usage import MAX_TENANTS, OTHER_TENANTS, TimeRow, TokenRow, UsageEntry
from baton_router.errors import StartError
from baton_router.usage.counter import MAX_MODELS, OTHER_MODELS, UsageCounter
from baton_router.usage.prices import PriceList, read_prices
from baton_router.usage.summary import DIMENSIONS, Dimension, Summary, csv_table, day_number

HOUR_MS = 3_600_000.0
DAY = day_number("2026-03-01")
PREFILL = UsageEntry(
    name="p0",
    role="prefill",
    model="m",
    wall_ms=3 * HOUR_MS,
    times=(
        TimeRow("a", "prefill", HOUR_MS),
        TimeRow("b", "lost", HOUR_MS / 2),
        TimeRow("", "idle", 1.5 * HOUR_MS),
    ),
)
DECODE = UsageEntry(
    name="d0",
    role="decode",
    model="m",
    wall_ms=HOUR_MS,
    times=(TimeRow("a", "decode", HOUR_MS),),
)
ROUTER = UsageEntry(
    name="r",
    tokens=(TokenRow("a", "m", 4, 1, 3000, 1000, 500), TokenRow("a", "n", 1, 0, 10, 0, 1)),
)
PRICES = """
currency = "EUR"
[tokens]
prompt = 1
cached = 0.25
completion = 4
[node_hour]
prefill = 10
decode = 2
[share]
lost = 0.5
idle = 0
"""


def rows(*by: Dimension, tenant: str | None = None, prices: Any = None) -> list[dict[str, Any]]:
    summary = Summary(by, tenant, prices)
    summary.add(DAY, [PREFILL, ROUTER])
    summary.add(DAY + 1, [DECODE])
    assert summary.wall_ms == 4 * HOUR_MS
    return [
        {
            name: value
            for name, value in msgspec.to_builtins(row).items()
            if value or name in DIMENSIONS
        }
        for row in summary.rows()
    ]


A_USED = {
    **{"busy_ms": 2 * HOUR_MS, "calls": 5, "errors": 1},
    **{"prompt_tokens": 3010, "cached_tokens": 1000, "completion_tokens": 501},
}
TABLES: dict[tuple[Dimension, ...], list[dict[str, Any]]] = {
    ("tenant",): [
        {"tenant": "", "idle_ms": 1.5 * HOUR_MS},
        {"tenant": "a"} | A_USED,
        {"tenant": "b", "busy_ms": HOUR_MS / 2},
    ],
    ("day", "cause"): [
        {"day": "2026-03-01", "cause": ""} | {k: v for k, v in A_USED.items() if k != "busy_ms"},
        {"day": "2026-03-01", "cause": "idle", "idle_ms": 1.5 * HOUR_MS},
        {"day": "2026-03-01", "cause": "lost", "busy_ms": HOUR_MS / 2},
        {"day": "2026-03-01", "cause": "prefill", "busy_ms": HOUR_MS},
        {"day": "2026-03-02", "cause": "decode", "busy_ms": HOUR_MS},
    ],
    ("node",): [
        {"node": ""} | {k: v for k, v in A_USED.items() if k != "busy_ms"},
        {"node": "d0", "busy_ms": HOUR_MS},
        {"node": "p0", "busy_ms": 1.5 * HOUR_MS, "idle_ms": 1.5 * HOUR_MS},
    ],
}


@pytest.mark.parametrize("by", TABLES, ids=" ".join)
def test_rows_are_sums_of_what_the_query_groups_by(by: tuple[Dimension, ...]) -> None:
    assert rows(*by) == TABLES[by]


def test_a_tenant_s_rows_are_its_own_without_idle_time() -> None:
    assert rows("tenant", tenant="b") == [{"tenant": "b", "busy_ms": HOUR_MS / 2}]
    assert rows("tenant", tenant="") == []


def test_costs_follow_from_tokens_roles_and_causes(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    costs = {
        row["tenant"]: row.get("cost") for row in rows("tenant", prices=read_prices(str(path)))
    }
    tokens = 2.010 * 1 + 1.0 * 0.25 + 0.501 * 4
    assert costs["a"] == pytest.approx(10 + 2 + tokens)
    assert costs["b"] == pytest.approx(0.5 * 0.5 * 10)
    assert costs[""] is None  # a cost of 0 is left out above


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tokens]\nprompt = -1", "prompt is -1.0; it must be 0 or more"),
        ("[tokens]\nprompt = nan", "prompt is nan"),
        ("[nodes]\n", "unknown field `nodes`"),
        ("[share]\nlost = 'x'", r"\$\.share\.lost"),
        ("= 3", "is not valid TOML"),
    ],
)
def test_a_wrong_price_list_is_refused_with_its_place(
    text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(StartError, match=words):
        read_prices(str(path))


def test_a_missing_price_list_is_refused_and_none_is_none(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        read_prices(str(tmp_path / "nothing"))
    assert read_prices("") is None


def test_csv_has_the_columns_of_the_query_and_quotes_names() -> None:
    summary = Summary(("model", "tenant"), prices=PriceList())
    summary.add(DAY, [msgspec.structs.replace(DECODE, model='m,"x"'), ROUTER])
    table = csv_table(summary.rows(), summary.by, cost=False)
    read = list(csv.DictReader(io.StringIO(table)))
    assert list(read[0])[:3] == ["model", "tenant", "busy_ms"]
    assert "cost" not in read[0]
    assert [row["model"] for row in read] == ["m", 'm,"x"', "n"]
    assert read[1]["busy_ms"] == "3600000.000000"
    assert sum(int(row["prompt_tokens"]) for row in read) == 3010


def test_a_counter_s_rows_are_bounded() -> None:
    counter = UsageCounter("r")
    for number in range(MAX_TENANTS + 3):
        counter.count_call(f"t{number}", "m", error=number % 2 == 0)
    for number in range(MAX_MODELS + 3):
        counter.count_tokens("t0", f"m{number}", 1, 1, 1)
    found = {(row.tenant, row.model): row for row in counter.entry().tokens}
    assert found[OTHER_TENANTS, "m"].calls == 3
    assert found["t0", OTHER_MODELS].prompt_tokens == 4
    assert len(found) == MAX_TENANTS + 1 + MAX_MODELS
