"""GET /usage: what tenants used, and where the time of the pool's nodes went.

In: days, and what rows are grouped by. Out: JSON, or CSV if the client asks for it. The numbers
come from the books on the index, which all nodes and routers write. A pool without an index has no
books: then this router's own counts and the nodes that it is connected to are the answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from aiohttp import web
from msgspec import UNSET, UnsetType

from baton_kvstore.errors import StoreError
from baton_kvstore.index.usage import DAY_S, KEPT_DAYS, UsageBooks, UsageWriter
from baton_protocol.errors import InvalidRequest, Unavailable
from baton_protocol.usage import USAGE_PATH, UsageEntry
from baton_router.http.json_response import json_response
from baton_router.http.media_types import CSV_TYPE
from baton_router.http.observers import CONTEXT
from baton_router.nodes.node_calls import NodeCallFailed, NodeCalls
from baton_router.nodes.pool_view import PoolView
from baton_router.openai.answers import Closed
from baton_router.usage.counter import UsageCounter
from baton_router.usage.prices import PriceList
from baton_router.usage.summary import (
    DIMENSIONS,
    Dimension,
    Summary,
    UsageRow,
    csv_table,
    day_name,
    day_number,
)

USUAL_DAYS = 30
FORMATS = ("json", "csv")

logger = logging.getLogger(__name__)


class PoolUsage(Closed):
    """`covers`: with the index all nodes and routers count; without, the nodes that live and this
    router, since each has started. `since` and `until` are days, both included. `wall_ms` is the
    time of all nodes since their engines were ready: of an answer for an operator, the sum of
    `busy_ms` and `idle_ms` over all rows."""

    pool: str
    covers: Literal["index", "live"]
    since: str
    until: str
    by: list[Dimension]
    rows: list[UsageRow]
    wall_ms: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSources:
    """`books` and `writer` are None without an index. The others are those of this router."""

    books: UsageBooks | None
    writer: UsageWriter | None
    counter: UsageCounter
    calls: NodeCalls
    view: PoolView


@dataclass(frozen=True, slots=True)
class UsageRoutes:
    """`prices` returns those of the file as last read."""

    pool: str
    sources: UsageSources
    prices: Callable[[], PriceList | None]

    def routes(self) -> list[web.RouteDef]:
        return [web.get(USAGE_PATH, self.usage)]

    async def usage(self, request: web.Request) -> web.Response:
        """An operator sees all rows, a tenant its own."""
        reader = request[CONTEXT].tenant
        assert reader is not None, "the middleware sets the tenant"
        by, form = _by(request), _format(request)
        prices = self.prices()
        summary = Summary(by, None if reader.admin else reader.name, prices)
        try:
            first, last = await self._add(summary, request)
        except StoreError as error:
            raise Unavailable(f"the index has the books, and does not answer: {error}") from error
        if form == "csv":
            table = csv_table(summary.rows(), by, cost=prices is not None)
            return web.Response(text=table, content_type=CSV_TYPE)
        return json_response(
            PoolUsage(
                pool=self.pool,
                covers="live" if self.sources.books is None else "index",
                since=day_name(first),
                until=day_name(last),
                by=list(by),
                rows=summary.rows(),
                wall_ms=summary.wall_ms if reader.admin else UNSET,
                currency=UNSET if prices is None else prices.currency,
            )
        )

    async def _add(self, summary: Summary, request: web.Request) -> tuple[int, int]:
        """Add the entries of the days that the query names, and return the first and the last."""
        books, writer = self.sources.books, self.sources.writer
        if books is None or writer is None:
            today = int(time.time()) // DAY_S
            first, last = _days(request, today)
            if first <= today <= last:
                summary.add(today, await self._live())
            return first, last
        await writer.write()
        first, last = _days(request, await books.today())
        for day in range(first, last + 1):
            summary.add(day, await books.read(day))
        return first, last

    async def _live(self) -> Iterable[UsageEntry]:
        """This router's entry, and those of the nodes that answer."""
        calls = [self.sources.calls.usage(node) for node in self.sources.view.nodes]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        entries = [self.sources.counter.entry()]
        for answer in answers:
            if isinstance(answer, UsageEntry):
                entries.append(answer)
            elif isinstance(answer, NodeCallFailed):
                logger.warning("its time is left out: %s", answer)
            else:
                raise answer
        return entries


def _by(request: web.Request) -> tuple[Dimension, ...]:
    """What rows are grouped by, in the order of the query."""
    wanted = ",".join(request.query.getall("by", [])) or "tenant"
    known = {name: name for name in DIMENSIONS}
    names = list(dict.fromkeys(wanted.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(
            f"by is {unknown[0]!r}; use {', '.join(DIMENSIONS)}, or several with commas", param="by"
        )
    return tuple(known[name] for name in DIMENSIONS if name in names)


def _format(request: web.Request) -> str:
    values = request.query.getall("format", [])
    if not values:
        return "csv" if CSV_TYPE in request.headers.get("Accept", "") else "json"
    if len(values) > 1 or values[0] not in FORMATS:
        raise InvalidRequest(f"format is {values[0]!r}; use json or csv", param="format")
    return values[0]


def _days(request: web.Request, today: int) -> tuple[int, int]:
    """The first and the last day."""
    last = _day(request, "until", today)
    first = _day(request, "since", last - USUAL_DAYS + 1)
    if first > last:
        raise InvalidRequest(
            f"since is {day_name(first)}, after {day_name(last)}, the last day", param="since"
        )
    if last - first >= KEPT_DAYS:
        raise InvalidRequest(
            f"since is {day_name(first)}, {last - first + 1} days; ask for at most {KEPT_DAYS}",
            param="since",
        )
    return first, last


def _day(request: web.Request, name: str, otherwise: int) -> int:
    values = request.query.getall(name, [])
    if not values:
        return otherwise
    try:
        day = day_number(values[0])
    except ValueError:
        day = -1
    if day < 0 or len(values) > 1:
        raise InvalidRequest(f"{name} is {values[0]!r}; write a day as 2026-01-31", param=name)
    return day
