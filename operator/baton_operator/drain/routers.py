"""Asks a pool's routers to drain one of its nodes, or to use it again.

In: addresses of router pods, the pool's link token. Out: one `DrainAnswer` from all their answers.
One router is enough, because the node informs the others; all are asked, because one may have no
link to the node. The request is idempotent: the deadline counts from the first time.

The code in a pool's pods is not trusted: only the start of an answer is read, redirects are not
followed, and nothing is decompressed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from baton_operator.drain.marks import LeaveTerms
from baton_operator.drain.steps import DrainAnswer, DrainOutcome
from baton_operator.names import ROUTER_PORT

# A router answers when the node has acknowledged, or after 2 s.
CONNECT_S = 2.0
ANSWER_S = 4.0
LONGEST_WORDS = 200
LONGEST_ANSWER = 16 << 10
_OUTCOMES: dict[int, DrainOutcome] = {
    200: "taken",
    400: "unknown",
    404: "unknown",
    503: "unable",
}
# The first of these outcomes that any router gave counts: one success is enough, and a router that
# did not answer may know the node.
_RANK = ("taken", "failed", "unable", "unknown")


class Routers:
    """For one event loop; call `close` at the end."""

    def __init__(self, port: int = ROUTER_PORT, answer_s: float = ANSWER_S) -> None:
        timeout = aiohttp.ClientTimeout(total=answer_s, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(
            timeout=timeout,
            trust_env=False,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._port = port
        self._answer_s = answer_s

    async def close(self) -> None:
        await self._session.close()

    async def drain_node(
        self, addresses: Sequence[str], token: str, node: str, leave: LeaveTerms
    ) -> DrainAnswer:
        """Requests that run longer than `leave` allows move to other nodes."""
        body = {"deadline_s": leave.seconds, "reason": "scale-down"}
        if leave.replaced_by:
            body |= {"reason": "roll-out", "replaced_by": leave.replaced_by}
        return await self._ask_all(addresses, token, f"/nodes/{node}/drain", body)

    async def resume_node(self, addresses: Sequence[str], token: str, node: str) -> DrainAnswer:
        return await self._ask_all(addresses, token, f"/nodes/{node}/resume", {})

    async def _ask_all(
        self, addresses: Sequence[str], token: str, path: str, body: Mapping[str, Any]
    ) -> DrainAnswer:
        if not addresses:
            return DrainAnswer("failed", "no router is ready to drain or resume the node")
        answers = await asyncio.gather(
            *(self._ask(address, token, path, body) for address in addresses)
        )
        return min(answers, key=lambda answer: _RANK.index(answer.outcome))

    async def _ask(
        self, address: str, token: str, path: str, body: Mapping[str, Any]
    ) -> DrainAnswer:
        host = f"[{address}]" if ":" in address else address
        router = f"the router at {host}:{self._port}"
        content: dict[str, Any] = {"json": body} if body else {}
        try:
            async with self._session.post(
                f"http://{host}:{self._port}{path}",
                headers={"Authorization": f"Bearer {token}"},
                allow_redirects=False,
                **content,
            ) as answer:
                outcome: DrainOutcome = _OUTCOMES.get(answer.status, "failed")
                message = _error_message(await _beginning(answer))
                return DrainAnswer(outcome, f"{router} answered {answer.status}: {message}")
        except TimeoutError:
            return DrainAnswer("failed", f"{router} did not answer within {self._answer_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return DrainAnswer("failed", f"{router}: {error}")


async def _beginning(answer: aiohttp.ClientResponse) -> str:
    data = b""
    while len(data) < LONGEST_ANSWER:
        piece = await answer.content.read(LONGEST_ANSWER - len(data))
        if not piece:
            break
        data += piece
    return data.decode(errors="replace")


def _error_message(text: str) -> str:
    """The message of an OpenAI error, else the whole text; as one line."""
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text
    return " ".join(message.split())[:LONGEST_WORDS]
