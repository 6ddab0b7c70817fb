"""The link token: the router sends it to every node and reports each node that refuses it."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from baton_router.nodes.link import NOT_OUR_TOKEN
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

TOKEN = "t0ken-of-the-pool"


async def test_nodes_that_require_the_token_get_it_for_links_and_artifacts(
    prefill: FakeNode, decode: FakeNode
) -> None:
    prefill.token = decode.token = TOKEN
    async with pools.running(prefill, decode, link_token=TOKEN) as client:
        status, _, _ = await client.post("/v1/completions", {"prompt": "x", "max_tokens": 2})
        assert status == 200
        assert (await client.get("/pool"))[1]["unreachable"] == []
    assert prefill.refused == decode.refused == 0


@pytest.mark.parametrize("token", ["", "another"])
async def test_a_node_that_refuses_the_token_is_logged_once_shown_and_retried_with_pauses(
    token: str,
    decode: FakeNode,
    other: FakeNode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="baton_router")
    other.token = TOKEN
    async with pools.running(decode, link_token=token, tunables={"reconnect_max_s": 0.4}) as client:
        client.dial(other.address)
        await until(lambda: other.refused >= 3)
        refused, began = other.refused, time.monotonic()
        await until(lambda: other.refused >= refused + 4)
        # Each pause is at least half of reconnect_max_s.
        assert time.monotonic() - began > 3 * 0.2
        _, pool, _ = await client.get("/pool")
        assert pool["unreachable"] == [{"address": other.address, "reason": NOT_OUR_TOKEN}]
        assert [node["id"] for node in pool["nodes"]] == ["decode-0"]
        logged = [record for record in caplog.records if NOT_OUR_TOKEN in record.message]
        assert [(record.levelname, other.address in record.message) for record in logged] == [
            ("WARNING", True)
        ]
        assert TOKEN not in caplog.text


async def test_a_node_that_accepts_the_token_later_is_used(
    decode: FakeNode, other: FakeNode
) -> None:
    other.token = "another"
    async with pools.running(decode, link_token=TOKEN) as client:
        client.dial(other.address)
        await until(lambda: other.refused)
        other.token = TOKEN
        await client.ready(2)
        assert (await client.get("/pool"))[1]["unreachable"] == []


async def test_an_unreachable_address_is_shown_with_the_reason(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        client.dial("http://127.0.0.1:1")
        await until_is(client.unreachable, ["http://127.0.0.1:1"])
        [entry] = (await client.get("/pool"))[1]["unreachable"]
        assert entry["address"] == "http://127.0.0.1:1"
        assert "Connect call failed" in entry["reason"]


async def test_each_router_identifies_its_links_by_its_own_secret(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await decode.drop_links()
        await until(lambda: decode.links == 2)
        pool = await client.text("/pool")
    async with pools.running(decode):
        pass
    first, again, other = decode.routers
    assert len(first) == 32
    assert first == again
    assert first != other
    assert first not in pool


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": "keys"}, False),
    ],
)
async def test_a_router_on_all_interfaces_without_api_keys_warns_once(
    decode: FakeNode,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    warned: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("acme sk-of-acme\n")
    async with pools.running(decode, **settings):
        logged = [record for record in caplog.records if "--api-keys" in record.message]
    assert [record.levelname for record in logged] == ["WARNING"] * warned


def test_reprs_of_settings_and_router_show_no_secrets() -> None:
    settings = RouterSettings(index_url="redis://:s3cret@h", link_token="s3cret")
    assert "s3cret" not in repr(settings) + repr(Router(settings))
