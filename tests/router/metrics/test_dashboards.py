"""The chart's Grafana dashboards query only metrics that routers and nodes export."""

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
    panels: list[dict[str, Any]] = json.loads(path.read_text())["panels"]
    return panels


def queried(path: Path) -> set[str]:
    exprs = [target["expr"] for panel in panels(path) for target in panel["targets"]]
    return {name for expr in exprs for name in NAME.findall(expr)}


def exported(page: str) -> set[str]:
    """All series names of a metrics page, including those without a sample yet."""
    names: set[str] = set()
    for name, kind in TYPE.findall(page):
        suffixes = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
        names |= {name + end for end in suffixes}
    return names


async def exported_names() -> set[str]:
    """The series names of a router and a node."""
    node = NodeSettings(node="n0", role="decode", port=free_port(), engine="sim", kv_blocks=100)
    async with (
        running(node) as [process],
        Router(RouterSettings(port=0, nodes=(process.url,))) as router,
        aiohttp.ClientSession() as session,
    ):
        await until(lambda: list(router.view.ready()))
        names: set[str] = set()
        for url in (process.url, f"http://127.0.0.1:{router.port}"):
            async with session.get(f"{url}/metrics") as answer:
                names |= exported(await answer.text())
        return names


@pytest.mark.integration
async def test_every_metric_of_a_dashboard_exists() -> None:
    existing = await exported_names()
    names = {name for path in DASHBOARDS for name in queried(path)}
    assert len(names) > 30
    assert names - existing == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_the_panels_of_a_dashboard_have_unique_titles_and_positions_and_filter_by_pool(
    path: Path,
) -> None:
    all_panels = panels(path)
    titles = [panel["title"] for panel in all_panels]
    assert len(all_panels) > 10
    assert len(set(titles)) == len(titles)
    positions = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in all_panels}
    assert len(positions) == len(all_panels)
    for panel in all_panels:
        assert panel["targets"]
        for target in panel["targets"]:
            expr = target["expr"]
            assert expr.count("(") == expr.count(")")
            assert all('pool=~"$pool"' in part for part in NAME.split(expr)[1:]), expr


def test_dashboards_have_unique_uids() -> None:
    dashboards = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len({each["uid"] for each in dashboards}) == len(dashboards) == 2
