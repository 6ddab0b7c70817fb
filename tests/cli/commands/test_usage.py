"""`baton usage`: the table, CSV and JSON of a router's books."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from baton_cli.commands.usage import lines_of, run
from baton_cli.commands.usage_options import UsageOptions
from baton_cli.errors import CommandError
from tests.router.pools import COMPLETIONS, ask, running
from tests.support.nodes.fake_node import FakeNode

ROW: dict[str, Any] = {
    **{"busy_ms": 61_500.0, "idle_ms": 0.0, "calls": 12, "errors": 1},
    **{"prompt_tokens": 3000, "cached_tokens": 40, "completion_tokens": 500},
}
ANSWER: dict[str, Any] = {
    **{"pool": "default", "covers": "index", "since": "2026-03-01", "until": "2026-03-02"},
    "by": ["tenant"],
    "rows": [ROW | {"tenant": ""}, ROW | {"tenant": "acme"}],
    "wall_ms": 123_000.0,
}


def test_the_table_has_a_row_for_each_group() -> None:
    assert list(lines_of(ANSWER)) == [
        "pool default, 2026-03-01 to 2026-03-02",
        "TENANT  BUSY S  IDLE S  CALLS  ERRORS  PROMPT  CACHED  COMPLETION",
        "-         61.5     0.0     12       1    3000      40         500",
        "acme      61.5     0.0     12       1    3000      40         500",
    ]


def test_costs_and_what_the_books_cover_are_below_the_table() -> None:
    rows = [row | {"cost": 1.25} for row in ANSWER["rows"]]
    lines = list(lines_of(ANSWER | {"covers": "live", "currency": "EUR", "rows": rows}))
    assert lines[1].endswith("COMPLETION    COST")
    assert lines[3].endswith("500  1.2500")
    assert lines[4] == "costs are in EUR"
    assert lines[5].startswith("this pool has no index")


def test_a_pool_without_calls_has_a_table_of_heads() -> None:
    assert len(list(lines_of(ANSWER | {"rows": []}))) == 2


@pytest.mark.integration
async def test_it_prints_the_answer_of_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeNode("d", "decode") as node, running(node) as client:
        _, answer, _ = await client.post(COMPLETIONS, ask())
        tokens = str(answer["usage"]["completion_tokens"])
        for csv, as_json in ((False, False), (True, False), (False, True)):
            by = ("model", "tenant")
            options = UsageOptions(url=client.url, by=by, csv=csv, json=as_json)
            assert await asyncio.to_thread(run, options) == 0
            shown = capsys.readouterr().out
            assert "fake-model" in shown
            assert tokens in shown
        assert json.loads(shown)["by"] == ["tenant", "model"]
        wrong = UsageOptions(url=client.url, since="monday")
        with pytest.raises(CommandError, match=r"since is 'monday'.*\(HTTP 400\)"):
            await asyncio.to_thread(run, wrong)


@pytest.mark.integration
def test_no_router_is_an_error_with_the_url() -> None:
    with pytest.raises(CommandError, match=r"no router answers at http://127\.0\.0\.1:1"):
        run(UsageOptions(url="http://127.0.0.1:1"))
