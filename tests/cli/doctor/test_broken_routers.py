"""A table of broken pools: doctor finds each by asking the router, its advice repairs it."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from baton_cli.commands.up import reserve_port
from baton_cli.doctor.finding import Finding
from baton_cli.doctor.host import Host
from baton_cli.doctor.ports import check_port
from baton_protocol.ids import Fingerprint
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.cli.doctor.setups import PATIENCE, Setup, check_repaired, find, names_of
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

Row = Callable[[Path], AbstractAsyncContextManager[Setup]]


@asynccontextmanager
async def running(*nodes: FakeNode, port: int = 0, **settings: Any) -> AsyncIterator[Router]:
    """A router that has tried to reach each of these nodes."""
    addresses = tuple(node.address for node in nodes)
    async with Router(RouterSettings(port=port, nodes=addresses, **settings)) as router:
        async with aiohttp.ClientSession() as session:
            token = router.settings.link_token or "admin-key"
            tried = partial(_has_tried, session, url_of(router), token, len(nodes))
            await until_is(tried, True)
        yield router


async def _has_tried(session: aiohttp.ClientSession, url: str, token: str, nodes: int) -> bool:
    headers = {"Authorization": f"Bearer {token}"}
    async with session.get(f"{url}/pool", headers=headers) as answer:
        pool = await answer.json()
    states = [node["state"] for node in pool["nodes"]] + [
        node["reason"] for node in pool["unreachable"]
    ]
    reachable = pool["store"]["reachable"] is not None or not pool["store"]["configured"]
    return reachable and len(states) == nodes and "starting" not in states and all(states)


def url_of(router: Router) -> str:
    return f"http://127.0.0.1:{router.port}"


def broken(url: str, found: str, remedy: str, **more: Any) -> Setup:
    flags = {"router": url, **more}
    return Setup(
        check="router", flags=flags, found=found, remedy=remedy, follow=lambda finding: None
    )


@asynccontextmanager
async def sound(port: int = 0) -> AsyncIterator[str]:
    """The URL of a router with a node, which serves."""
    async with FakeNode("decode-0", "decode") as node, running(node, port=port) as router:
        await until(lambda: len(list(router.view.ready())) == 1)
        yield url_of(router)


@asynccontextmanager
async def _no_router(folder: Path) -> AsyncIterator[Setup]:
    with reserve_port("127.0.0.1", 0) as reserved:
        port = reserved.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    yield broken(url, f"no router answers at {url}", "baton router --help")


@asynccontextmanager
async def _another_server(folder: Path) -> AsyncIterator[Setup]:
    async with FakeNode("decode-0", "decode") as node:
        yield broken(node.address, "is not a Baton router", "give the router's URL")


@asynccontextmanager
async def _a_wrong_key(folder: Path) -> AsyncIterator[Setup]:
    keys = folder / "keys"
    keys.write_text("acme user-key\nops admin-key admin\n")
    async with FakeNode("decode-0", "decode") as node, running(node, api_keys=str(keys)) as router:
        setup = broken(
            url_of(router), "the router refuses the key", "an admin's key", api_key="wrong-key"
        )
        yield dataclasses.replace(setup, follow=lambda finding: {"api_key": "admin-key"})


@asynccontextmanager
async def _a_key_without_rights(folder: Path) -> AsyncIterator[Setup]:
    keys = folder / "keys"
    keys.write_text("acme user-key\nops admin-key admin\n")
    async with FakeNode("decode-0", "decode") as node, running(node, api_keys=str(keys)) as router:
        setup = broken(url_of(router), "needs an admin key", "an admin's key", api_key="user-key")
        yield dataclasses.replace(setup, follow=lambda finding: {"api_key": "admin-key"})


@asynccontextmanager
async def _a_node_of_another_fingerprint(folder: Path) -> AsyncIterator[Setup]:
    async with (
        FakeNode("decode-0", "decode") as first,
        FakeNode("decode-1", "decode") as second,
        FakeNode("decode-2", "decode", fingerprint=Fingerprint("e" * 32)) as other,
        running(first, second, other) as router,
    ):
        setup = broken(
            url_of(router), "decode-2 is of another kind than the rest: fingerprint", "--dtype"
        )

        async def restart() -> None:
            same = first.report.fingerprint
            other.report = msgspec.structs.replace(other.report, fingerprint=same)
            await other.restart("epoch-2")
            kinds = router.view.nodes
            await until(lambda: kinds[other.report.node].report.fingerprint == same)
            await until(lambda: len(list(router.view.ready())) == 3)

        yield dataclasses.replace(setup, follow=in_loop(restart))


@asynccontextmanager
async def _a_node_without_a_link_token(folder: Path) -> AsyncIterator[Setup]:
    async with FakeNode("decode-0", "decode") as safe, FakeNode("decode-1", "decode") as unsafe:
        safe.token = "word"
        async with running(safe, unsafe, link_token="word") as router:
            setup = broken(
                url_of(router),
                f"decode-1 at {unsafe.address} requires no link token",
                "BATON_LINK_TOKEN",
                api_key="word",
            )

            def follow(finding: Finding) -> None:
                unsafe.token = "word"

            yield dataclasses.replace(setup, follow=follow)


@asynccontextmanager
async def _a_node_with_another_link_token(folder: Path) -> AsyncIterator[Setup]:
    async with FakeNode("decode-0", "decode") as first, FakeNode("decode-1", "decode") as node:
        node.token = "another"
        async with running(first, node) as router:
            setup = broken(
                url_of(router), "the node refuses this router's link token", "--link-token"
            )

            async def give_token() -> None:
                node.token = ""
                await until(lambda: len(list(router.view.ready())) == 2)

            yield dataclasses.replace(setup, follow=in_loop(give_token))


@asynccontextmanager
async def _a_node_that_is_gone(folder: Path) -> AsyncIterator[Setup]:
    async with FakeNode("decode-0", "decode") as first, FakeNode("decode-1", "decode") as node:
        port = int(node.address.rpartition(":")[2])
        await node.stop()
        async with running(first, node) as router:
            setup = broken(url_of(router), f"node {node.address} is unreachable", "whether it runs")

            async def start() -> None:
                await node.start(port)
                await until(lambda: len(list(router.view.ready())) == 2)

            yield dataclasses.replace(setup, follow=in_loop(start))


@asynccontextmanager
async def _a_node_that_drains(folder: Path) -> AsyncIterator[Setup]:
    async with (
        FakeNode("decode-0", "decode") as first,
        FakeNode("decode-1", "decode") as node,
        running(first, node) as router,
    ):
        await node.say_load("draining")
        await until(lambda: len(list(router.view.ready())) == 1)
        setup = broken(url_of(router), "node decode-1 is draining", "resume it")

        async def resume() -> None:
            await node.say_load("ready")
            await until(lambda: len(list(router.view.ready())) == 2)

        yield dataclasses.replace(setup, follow=in_loop(resume))


@asynccontextmanager
async def _an_index_that_is_gone(folder: Path) -> AsyncIterator[Setup]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        index = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        async with (
            FakeNode("decode-0", "decode") as node,
            running(node, index_url=index) as router,
        ):
            yield broken(
                url_of(router), "the router does not reach the index", "baton doctor --index"
            )


# The advice for these is to start something that is not there: the next run is of a sound pool.
ELSEWHERE: list[Row] = [
    _no_router,
    _another_server,
    _an_index_that_is_gone,
]
IN_PLACE: list[Row] = [
    _a_wrong_key,
    _a_key_without_rights,
    _a_node_of_another_fingerprint,
    _a_node_without_a_link_token,
    _a_node_with_another_link_token,
    _a_node_that_is_gone,
    _a_node_that_drains,
]


@pytest.mark.parametrize(("given", "severity"), [(True, "error"), (False, "note")])
async def test_a_router_s_own_port_is_taken_only_if_it_shall_be_free(
    given: bool, severity: str
) -> None:
    async with sound() as url:
        port = int(url.rpartition(":")[2])
        check = partial(check_port, port, Host(patience=PATIENCE), given=given)
        [finding] = await asyncio.to_thread(lambda: list(check()))
    assert finding.severity == severity
    assert finding.remedy


def in_loop(act: Callable[[], Any]) -> Callable[[Finding], None]:
    """An act of this event loop, for a thread."""
    loop = asyncio.get_running_loop()
    return lambda finding: asyncio.run_coroutine_threadsafe(act(), loop).result()


@pytest.mark.parametrize("row", IN_PLACE, ids=names_of(IN_PLACE))
async def test_doctor_finds_a_broken_pool_and_its_advice_repairs_it(
    row: Row, tmp_path: Path
) -> None:
    async with row(tmp_path) as setup:
        finding = await asyncio.to_thread(find, setup)
        change = await asyncio.to_thread(setup.follow, finding)
        await asyncio.to_thread(check_repaired, setup, change)


@pytest.mark.parametrize("row", ELSEWHERE, ids=names_of(ELSEWHERE))
async def test_doctor_says_what_to_start(row: Row, tmp_path: Path) -> None:
    async with row(tmp_path) as setup:
        await asyncio.to_thread(find, setup)
    async with sound() as url:
        await asyncio.to_thread(check_repaired, setup, {"router": url})
