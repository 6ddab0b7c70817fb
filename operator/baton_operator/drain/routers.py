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
from baton_operator.drain.steps import DrainAnswer, Outcome
from baton_operator.names import ROUTER_PORT

# A router answers when the node has acknowledged, or after 2 s.
CONNECT_S = 2.0
ANSWER_S = 4.0
LONGEST_WORDS = 200
LONGEST_ANSWER = 16 << 10
_OUTCOMES: dict[int, Outcome] = {
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

    async def drain(
        self, addresses: Sequence[str], token: str, node: str, leave: LeaveTerms
    ) -> DrainAnswer:
        """Requests that run longer than `leave` allows move to other nodes."""
        words = {"deadline_s": leave.seconds, "reason": "scale-down"}
        if leave.replaced_by:
            words |= {"reason": "roll-out", "replaced_by": leave.replaced_by}
        return await self._tell(addresses, token, f"/nodes/{node}/drain", words)

    async def resume(self, addresses: Sequence[str], token: str, node: str) -> DrainAnswer:
        return await self._tell(addresses, token, f"/nodes/{node}/resume", {})

    async def _tell(
        self, addresses: Sequence[str], token: str, path: str, words: Mapping[str, Any]
    ) -> DrainAnswer:
        if not addresses:
            return DrainAnswer("failed", "no router is ready to be told")
        answers = await asyncio.gather(
            *(self._ask(address, token, path, words) for address in addresses)
        )
        return min(answers, key=lambda answer: _RANK.index(answer.outcome))

    async def _ask(
        self, address: str, token: str, path: str, words: Mapping[str, Any]
    ) -> DrainAnswer:
        host = f"[{address}]" if ":" in address else address
        where = f"the router at {host}:{self._port}"
        body: dict[str, Any] = {"json": words} if words else {}
        try:
            async with self._session.post(
                f"http://{host}:{self._port}{path}",
                headers={"Authorization": f"Bearer {token}"},
                allow_redirects=False,
                **body,
            ) as answer:
                outcome: Outcome = _OUTCOMES.get(answer.status, "failed")
                said = _words(await _beginning(answer))
                return DrainAnswer(outcome, f"{where} answered {answer.status}: {said}")
        except TimeoutError:
            return DrainAnswer("failed", f"{where} did not answer within {self._answer_s:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return DrainAnswer("failed", f"{where}: {error}")


async def _beginning(answer: aiohttp.ClientResponse) -> str:
    data = b""
    while len(data) < LONGEST_ANSWER:
        piece = await answer.content.read(LONGEST_ANSWER - len(data))
        if not piece:
            break
        data += piece
    return data.decode(errors="replace")


def _words(text: str) -> str:
    """The message of an OpenAI error, else the whole text; as one line."""
    try:
        said = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        said = text
    return " ".join(said.split())[:LONGEST_WORDS]
