"""The chart's Grafana dashboards ask for metrics that routers and nodes have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton_node.settings import NodeSettings
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.support.nodes.processes import free_port, running
from tests.support.waiting import until

DASHBOARDS = sorted((Path(__file__).parents[3] / "charts/baton/dashboards").glob("*.json"))
NAME = re.compile(r"\bbaton_\w+")
TYPE = re.compile(r"^# TYPE (\w+) (\w+)$", re.MULTILINE)


def panels(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return found


def asked(path: Path) -> set[str]:
    exprs = [target["expr"] for panel in panels(path) for target in panel["targets"]]
    return {name for expr in exprs for name in NAME.findall(expr)}


def named(page: str) -> set[str]:
    """What can be asked of a page, also of what was not counted yet."""
    names: set[str] = set()
    for name, kind in TYPE.findall(page):
        ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + end for end in ends}
    return names


async def pages() -> set[str]:
    node = NodeSettings(node="n0", role="decode", port=free_port(), engine="sim", kv_blocks=100)
    async with (
        running(node) as [process],
        Router(RouterSettings(port=0, nodes=(process.url,))) as router,
        aiohttp.ClientSession() as session,
    ):
        await until(lambda: list(router.view.ready()))
        found: set[str] = set()
        for url in (process.url, f"http://127.0.0.1:{router.port}"):
            async with session.get(f"{url}/metrics") as answer:
                found |= named(await answer.text())
        return found


@pytest.mark.integration
async def test_every_metric_of_a_dashboard_exists() -> None:
    known = await pages()
    wanted = {name for path in DASHBOARDS for name in asked(path)}
    assert len(wanted) > 30
    assert wanted - known == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_has_panels_that_can_be_told_apart(path: Path) -> None:
    shown = panels(path)
    titles = [panel["title"] for panel in shown]
    assert len(shown) > 10
    assert len(set(titles)) == len(titles)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in shown}
    assert len(places) == len(shown)
    for panel in shown:
        assert panel["targets"]
        for target in panel["targets"]:
            expr = target["expr"]
            assert expr.count("(") == expr.count(")")
            assert all('pool=~"$pool"' in part for part in NAME.split(expr)[1:]), expr


def test_dashboards_have_names_of_their_own() -> None:
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({each["uid"] for each in dashboards}) == len(dashboards) == 2
