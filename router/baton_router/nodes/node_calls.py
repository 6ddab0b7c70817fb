"""Calls of the nodes' own routes: for operators, which answer when the act is done, and of usage.

In: a node, a path, a query. Out: the node's answer, or a NodeCallFailed whose message says which
node refused, and why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import TypeVar

import aiohttp
import msgspec

from baton_protocol.ids import NodeId
from baton_protocol.node_sleep import SleepState
from baton_protocol.usage import USAGE_PATH, UsageEntry
from baton_router.nodes.fleet import Fleet

LONGEST_ANSWER = 4096
LONGEST_USAGE = 1 << 20
LONGEST_WORDS = 300
USAGE_TIMEOUT_S = 5.0

T = TypeVar("T")
Query = Mapping[str, str] | list[tuple[str, str]]


class NodeCallFailed(Exception):
    """The node did not obey. `status` is that of its answer; 0 if there is none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NodeCalls:
    """`session` has the headers that the nodes require."""

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession) -> None:
        self._fleet = fleet
        self._session = session

    async def post(self, node: NodeId, path: str, query: Query) -> SleepState:
        """Returns when the node has obeyed, which may take minutes. Raises NodeCallFailed."""
        return await self._call("POST", node, path, query, SleepState, LONGEST_ANSWER)

    async def usage(self, node: NodeId) -> UsageEntry:
        """Where the node's time went. Raises NodeCallFailed."""
        try:
            async with asyncio.timeout(USAGE_TIMEOUT_S):
                return await self._call("GET", node, USAGE_PATH, {}, UsageEntry, LONGEST_USAGE)
        except TimeoutError as error:
            raise NodeCallFailed(f"{node} does not answer in {USAGE_TIMEOUT_S:g} s") from error

    async def _call(
        self, method: str, node: NodeId, path: str, query: Query, kind: type[T], most_bytes: int
    ) -> T:
        address = self._fleet.address_of(node)
        if address is None:
            raise NodeCallFailed(f"{node} has no address any more")
        try:
            async with self._session.request(
                method, address + path, params=query, allow_redirects=False
            ) as answer:
                body = b""
                while len(body) < most_bytes and (chunk := await answer.content.readany()):
                    body += chunk
                if answer.status == HTTPStatus.OK:
                    return msgspec.json.decode(body, type=kind)
                words = " ".join(body.decode(errors="replace").split())[:LONGEST_WORDS]
                raise NodeCallFailed(f"{node} refuses: {words}", answer.status)
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            raise NodeCallFailed(f"{node} does not answer: {error}") from error
