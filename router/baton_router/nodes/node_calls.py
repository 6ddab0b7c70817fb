"""Calls of the nodes' own admin routes, which answer when the act is done.

In: a node, a path, a query. Out: the node's answer, or a NodeCallFailed whose message says which
node refused, and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import aiohttp
import msgspec

from baton_protocol.ids import NodeId
from baton_protocol.node_sleep import SleepState
from baton_router.nodes.fleet import Fleet

LONGEST_ANSWER = 4096
LONGEST_WORDS = 300

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
        address = self._fleet.address_of(node)
        if address is None:
            raise NodeCallFailed(f"{node} has no address any more")
        try:
            async with self._session.post(
                address + path, params=query, allow_redirects=False
            ) as answer:
                body = await answer.content.read(LONGEST_ANSWER)
                if answer.status == HTTPStatus.OK:
                    return msgspec.json.decode(body, type=SleepState)
                words = " ".join(body.decode(errors="replace").split())[:LONGEST_WORDS]
                raise NodeCallFailed(f"{node} refuses: {words}", answer.status)
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            raise NodeCallFailed(f"{node} does not answer: {error}") from error
