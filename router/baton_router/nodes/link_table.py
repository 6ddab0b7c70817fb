"""The links by their nodes' addresses: discovery says which there are.

In: addresses. Out: a link each, and which nodes are unreachable or have a rival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton_router.nodes.link import NodeLink


class LinkTable:
    """Links by address; discovery fills it. At most one link represents a node."""

    def __init__(self, dial: Callable[[str], NodeLink]) -> None:
        self._dial = dial
        self.links: dict[str, NodeLink] = {}

    def ensure_link(self, address: str) -> None:
        address = address.rstrip("/")
        if address not in self.links:
            link = self._dial(address)
            self.links[address] = link
            link.start_dialling()

    def unreachable(self) -> dict[str, str]:
        """Addresses without a connection, and the last error of each."""
        return {address: link.trouble for address, link in self.links.items() if link.trouble}

    def conflicts(self) -> list[NodeLink]:
        """Links to nodes whose name a newer node has taken; see `NodeLink.rival`."""
        return [link for link in self.links.values() if link.rival]

    async def remove_link(self, address: str) -> None:
        link = self.links.pop(address, None)
        if link is not None:
            await link.close_link()

    async def close_links(self) -> None:
        await asyncio.gather(*(link.close_link() for link in self.links.values()))
        self.links.clear()
