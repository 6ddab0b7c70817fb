"""Reads a pool's books, and checks that they balance.

In: a router's URL, an API key. Out: rows of GET /usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlencode

from tests.support.clients.http import Json, exchange

WAIT_S = 60.0
POLL_S = 0.1
BALANCED = 0.005  # by how much the parts may differ from the whole


def books(url: str, by: str = "tenant", key: str = "", **query: str) -> Json:
    """The answer of a router to an operator, whose parts must add up to the nodes' time."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = exchange(url, f"/usage?{urlencode({'by': by, **query})}", headers=headers)
    assert answer.status == 200, answer.body
    body = answer.body
    if "wall_ms" in body:
        parts = sum(row["busy_ms"] + row["idle_ms"] for row in body["rows"])
        assert abs(parts - body["wall_ms"]) <= BALANCED * body["wall_ms"], body
    return body


def rows_by(url: str, name: str, key: str = "") -> dict[str, Json]:
    return {row[name]: row for row in books(url, name, key)["rows"]}


def await_books(ready: Callable[[], bool], what: str) -> None:
    """Wait until the books say so: nodes and routers write them about once a second."""
    deadline = time.monotonic() + WAIT_S
    while not ready():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s until {what}"
        time.sleep(POLL_S)
