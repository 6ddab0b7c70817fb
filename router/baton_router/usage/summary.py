"""Sums of a pool's books: entries of many days and processes as rows of a table. Pure.

In: entries with their days, whose rows count, how rows are grouped, prices. Out: the rows, sorted.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Literal, get_args

from msgspec import UNSET, UnsetType

from baton_protocol.usage import UsageEntry
from baton_router.openai.answers import Closed
from baton_router.usage.prices import PriceList

Dimension = Literal["day", "tenant", "model", "node", "cause"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
FIRST_DAY = date(1970, 1, 1)


class UsageRow(Closed):
    """What the calls of one group used. It has the names that the query groups by; "" is a row of
    none: idle time has no tenant, tokens have no node and no cause. Times are milliseconds of
    nodes, and `cost` is in the currency of the prices, which the row lacks without prices."""

    day: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    node: str | UnsetType = UNSET
    cause: str | UnsetType = UNSET
    busy_ms: float = 0.0
    idle_ms: float = 0.0
    calls: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float | UnsetType = UNSET


@dataclass(slots=True)
class Summary:
    """Adds entries up. Only rows of `tenant` count, if it is not None; idle time is nobody's.
    `wall_ms` is the time of all nodes since they were ready, as they measured it."""

    by: tuple[Dimension, ...]
    tenant: str | None = None
    prices: PriceList | None = None
    wall_ms: float = 0.0
    _rows: dict[tuple[str, ...], UsageRow] = field(default_factory=dict)

    def add(self, day: int, entries: Iterable[UsageEntry]) -> None:
        prices = self.prices or PriceList()
        for entry in entries:
            self.wall_ms += entry.wall_ms
            common = {"day": day_name(day), "node": entry.name, "model": entry.model}
            for time in entry.times:
                if self._counts(time.tenant, idle=time.cause == "idle"):
                    row = self._row(common | {"tenant": time.tenant, "cause": time.cause})
                    if time.cause == "idle":
                        row.idle_ms += time.ms
                    else:
                        row.busy_ms += time.ms
                    self._charge(row, prices.of_time(time, entry.role))
            for tokens in entry.tokens:
                if self._counts(tokens.tenant, idle=False):
                    names = {
                        "tenant": tokens.tenant,
                        "model": tokens.model,
                        "node": "",
                        "cause": "",
                    }
                    row = self._row(common | names)
                    row.calls += tokens.calls
                    row.errors += tokens.errors
                    row.prompt_tokens += tokens.prompt_tokens
                    row.cached_tokens += tokens.cached_tokens
                    row.completion_tokens += tokens.completion_tokens
                    self._charge(row, prices.of_tokens(tokens))

    def rows(self) -> list[UsageRow]:
        return [row for _, row in sorted(self._rows.items())]

    def _counts(self, tenant: str, *, idle: bool) -> bool:
        return self.tenant is None or (tenant == self.tenant and not idle)

    def _charge(self, row: UsageRow, cost: float) -> None:
        if self.prices is not None:
            row.cost = cost + (0.0 if row.cost is UNSET else row.cost)

    def _row(self, names: dict[str, str]) -> UsageRow:
        key = tuple(names[dimension] for dimension in self.by)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = UsageRow()
            for dimension, name in zip(self.by, key, strict=True):
                setattr(row, dimension, name)
        return row


def day_name(day: int) -> str:
    """A day since 1970 as YYYY-MM-DD."""
    return (FIRST_DAY + timedelta(days=day)).isoformat()


def day_number(name: str) -> int:
    """Raise ValueError for a text that is not YYYY-MM-DD."""
    if len(name) != 10:
        raise ValueError(name)
    return (date.fromisoformat(name) - FIRST_DAY).days


def csv_table(rows: Iterable[UsageRow], by: tuple[Dimension, ...], *, cost: bool) -> str:
    """The rows with a head, for spreadsheets."""
    figures = [name for name in UsageRow.__struct_fields__ if name not in DIMENSIONS]
    columns = [*by, *(name for name in figures if cost or name != "cost")]
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(getattr(row, name)) for name in columns] for row in rows)
    return table.getvalue()


def _cell(value: object) -> object:
    return f"{value:.6f}" if isinstance(value, float) else value
