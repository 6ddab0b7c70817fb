"""docs/coming-from-vllm-server.md is true of this side: what it says exists does, and what it says
does not exist does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from baton_cli.main import COMMANDS
from baton_cli.options.flag import flags_of
from baton_node.server.admin import AdminRoutes
from baton_router.http.openapi_operations import OPERATIONS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from-vllm-server.md"
ROUTE = re.compile(r"`((?:GET|POST|DELETE) /[^`]*)`")
FLAG = re.compile(r"`(--[a-z0-9-]+)`")
NONE, ALWAYS, SAME, NODE = "none", "always", "same", "node"
SERVING = ("up", "router", "prefill", "decode")


class Row(NamedTuple):
    theirs: str
    ours: str


def rows() -> Iterator[Row]:
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 5 and ("`" in cells[1]):
            yield Row(cells[1], cells[2])


ROWS = list(rows())
ROUTE_ROWS = [row for row in ROWS if ROUTE.search(row.theirs + row.ours)]
FLAG_ROWS = [row for row in ROWS if FLAG.search(row.theirs)]


def without_names(route: str) -> str:
    return re.sub(r"{\w+}", "{}", route)


def routes_here() -> dict[str, set[str]]:
    """The routes of a router and those that a node has for its admins."""
    admin = AdminRoutes(cast(Any, None)).routes()
    return {
        SAME: {without_names(f"{one.method} {one.path}") for one in OPERATIONS},
        NODE: {f"{route.method} {route.path}" for route in admin},
    }


def flags_here() -> set[str]:
    options = [command.options for command in COMMANDS if command.words in SERVING]
    return {flag.option for record in options for flag in flags_of(record) if not flag.hidden}


@pytest.mark.parametrize("row", ROUTE_ROWS, ids=lambda row: row.theirs[:60])
def test_a_route_is_here_if_the_page_says_so(row: Row) -> None:
    theirs = {without_names(route) for route in ROUTE.findall(row.theirs)}
    ours = {without_names(route) for route in ROUTE.findall(row.ours)}
    here = routes_here()
    if row.ours in (SAME, NODE):
        assert theirs <= here[row.ours]
    elif row.ours == NONE:
        assert not theirs & here[SAME]
    else:
        assert ours, row
        assert ours <= here[NODE if row.ours.startswith(f"{NODE}: ") else SAME]


@pytest.mark.parametrize("row", FLAG_ROWS, ids=lambda row: row.theirs[:60])
def test_a_flag_is_here_if_the_page_says_so(row: Row) -> None:
    theirs, ours = set(FLAG.findall(row.theirs)), set(FLAG.findall(row.ours))
    if row.ours == SAME:
        assert theirs <= flags_here()
    elif row.ours in (NONE, ALWAYS):
        assert not theirs & flags_here()
    else:
        assert ours, row
        assert ours <= flags_here()


def test_each_route_and_flag_has_one_row() -> None:
    for pattern in (ROUTE, FLAG):
        found = [name for row in ROWS for name in pattern.findall(row.theirs)]
        assert len(found) == len(set(found)) > 40
