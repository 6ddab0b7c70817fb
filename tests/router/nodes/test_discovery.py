"""Discovery: which addresses the router dials, and when it forgets one."""

from __future__ import annotations

import asyncio

from baton_kvstore.errors import StoreUnavailable
from baton_kvstore.index.registry import Registry
from baton_protocol.store import NodeReport
from baton_router.nodes.discovery import MISSES, Discovery
from baton_router.nodes.link import NodeLink
from baton_router.nodes.link_table import LinkTable
from tests.support.nodes.fake_node import make_report
from tests.support.waiting import until

NOWHERE = "redis://127.0.0.1:1"  # nothing listens there


class FakeRegistry(Registry):
    """A registry that returns `reports`, or fails if `broken`."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, "default")
        self.reports: list[NodeReport] = []
        self.broken = False
        self.polls = 0

    async def nodes(self) -> list[NodeReport]:
        self.polls += 1
        if self.broken:
            raise StoreUnavailable("the index is away")
        return self.reports


class Discovering:
    """A Discovery over one registry. Its links do nothing; tests set their state."""

    def __init__(self, *static: str) -> None:
        self.registry = FakeRegistry()
        self.forgotten: list[str] = []
        self.table = LinkTable(self._dial)
        self.discovery = Discovery(
            self.table,
            self.registry,
            static,
            interval_s=0.01,
            forget=lambda link: self.forgotten.append(link.address),
        )

    @staticmethod
    def _dial(address: str) -> NodeLink:
        link = NodeLink.__new__(NodeLink)
        link.address, link.up, link.rival, link._task = address, False, "", None
        link.start_dialling = lambda: None  # type: ignore[method-assign]
        return link

    async def polls(self, count: int) -> None:
        target = self.registry.polls + count
        await until(lambda: self.registry.polls >= target)

    async def __aenter__(self) -> Discovering:
        self._task = asyncio.create_task(self.discovery.keep_links())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def listed(address: str) -> NodeReport:
    return make_report("n", "decode", address=address)


async def test_registered_and_static_addresses_are_dialled_once() -> None:
    async with Discovering("http://a:1/") as discovering:
        discovering.registry.reports = [listed("http://a:1"), listed("http://b:2/")]
        await discovering.polls(2)
        assert set(discovering.table.links) == {"http://a:1", "http://b:2"}
        assert discovering.discovery.reachable is True


async def test_an_unlisted_address_is_forgotten_once_its_link_is_down() -> None:
    async with Discovering("http://a:1") as discovering:
        discovering.registry.reports = [listed("http://b:2"), listed("http://c:3")]
        await discovering.polls(2)
        discovering.table.links["http://c:3"].up = True
        discovering.registry.reports = []
        await discovering.polls(MISSES + 2)
        assert discovering.forgotten == ["http://b:2"]
        assert set(discovering.table.links) == {"http://a:1", "http://c:3"}


async def test_an_unlisted_node_with_a_name_conflict_is_kept() -> None:
    """Two nodes with one name overwrite each other's entry in the registry."""
    async with Discovering() as discovering:
        discovering.registry.reports = [listed("http://b:2")]
        await discovering.polls(2)
        discovering.table.links["http://b:2"].rival = "http://c:3"
        discovering.registry.reports = [listed("http://c:3")]
        await discovering.polls(MISSES + 2)
        assert [link.address for link in discovering.table.conflicts()] == ["http://b:2"]
        discovering.table.links["http://b:2"].rival = ""
        await until(lambda: discovering.forgotten == ["http://b:2"])


async def test_no_node_is_forgotten_while_the_registry_is_down() -> None:
    async with Discovering() as discovering:
        discovering.registry.reports = [listed("http://b:2")]
        await discovering.polls(2)
        discovering.registry.broken = True
        await discovering.polls(MISSES + 2)
        assert set(discovering.table.links) == {"http://b:2"}
        assert discovering.discovery.reachable is False
        discovering.registry.broken = False
        await discovering.polls(2)
        assert discovering.discovery.reachable is True
