"""The tables, the plot and the options of `router_capacity`, and streams that stay open."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from xml.etree import ElementTree

import pytest

from benchmarks.router.capacity import options_of, rates_table, streams_table, verdicts
from benchmarks.support.router.capacity_plot import plot
from benchmarks.support.router.open_streams import Fast, StreamFigures, open_streams
from benchmarks.support.servers import HOST
from tests.support.waiting import until

RATES = {
    "baton": {1: [80.0, 90.0, 85.0], 8: [150.0] * 3, 32: [200.0, 180.0, 190.0], 128: [170.0] * 3},
    "dynamo": {1: [70.0] * 3, 8: [160.0] * 3, 32: [400.0] * 3, 128: [390.0] * 3},
}


def test_the_tables_show_medians_and_ranges() -> None:
    head, ours, _ = rates_table(RATES)
    assert head.split() == ["requests/s,", "clients:", "1", "8", "32", "128"]
    assert "85 [80-90]" in ours
    assert "190 [180-200]" in ours
    fast = Fast(5.0, 9.0, 45.0)
    [_, baton, rival] = streams_table(
        [
            StreamFigures("baton", 1000, 40.0, 12.5, fast, fast._replace(p99=20.0)),
            StreamFigures("envoy", 1000, 30.0, None, fast, fast),
        ]
    )
    assert baton.endswith("1000 streams, 40.0 kB each, node's server 12.5 kB")
    assert "5.0/9.0" in baton
    assert "5.0/20.0" in baton
    assert rival.endswith("1000 streams, 30.0 kB each")


def test_the_goal_is_dynamos_rate_where_it_takes_part() -> None:
    [verdict] = verdicts(RATES)
    assert not verdict.met
    assert "0.47x" in verdict.text
    assert verdicts({"baton": RATES["baton"]}) == []


def test_the_plot_has_a_line_per_side_and_one_for_routers() -> None:
    picture = ElementTree.fromstring(plot(RATES, {1: [100.0], 2: [150.0, 170.0]}, 2))
    lines = [line for line in picture.iter() if line.tag.endswith("polyline")]
    assert [len((line.get("points") or "").split()) for line in lines] == [4, 4, 2]
    texts = [text.text for text in picture.iter() if text.tag.endswith("text")]
    assert {"baton", "dynamo", "128", "400"} <= set(texts)


def test_the_quick_form_is_one_short_pass_with_two_numbers_of_routers() -> None:
    options = options_of(["--quick"])
    assert (options.passes, options.less, options.routers, options.rivals) == (1, 8, [1, 2], [])


def test_a_plot_without_one_of_its_parts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--write", "--parts", "clients", "streams", "--rivals"])
    assert "which the plot shows" in capsys.readouterr().err


@pytest.mark.integration
async def test_streams_have_begun_and_end_with_the_block() -> None:
    open_now = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        await reader.readuntil(b'"user": "slow"}')
        open_now += 1
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {}\n\n")
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        open_now -= 1

    server = await asyncio.start_server(serve, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        async with open_streams(port, "m", 70):
            assert open_now == 70
        await until(lambda: open_now == 0)


@pytest.mark.integration
async def test_a_stream_that_ends_before_it_begins_is_an_error() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(refuse, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        with pytest.raises(ConnectionError, match="before it began"):
            async with open_streams(port, "m", 2):
                raise AssertionError("no stream has begun")
