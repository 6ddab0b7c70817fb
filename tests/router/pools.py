"""Routers on a free port, connected to fake nodes; requests to them, and what they report.

`async with running(node, handoff="always", tunables={"ping_s": 0.2}) as client` is a router.
Helpers send requests whose nodes fail, check that answers are complete, and read the router's
records.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from baton_protocol.link import PrefillJob, RunJob
from baton_router.requests.state import RequestRecord
from baton_router.server.router import Router
from baton_router.settings import RouterSettings, Tunables
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import WAIT_S, until

Reply = tuple[int, Any, dict[str, str]]  # status, JSON, headers

# Short retries keep the tests fast. The drain timeout is long enough for a slow machine.
TUNABLES = Tunables(
    reconnect_max_s=0.1, retry_model_s=0.05, reload_every_s=0.05, drain_answer_s=WAIT_S
)
COMPLETIONS = "/v1/completions"
REPLY = "Hello, world!"  # what a fake node answers
LONG = "x" * 200


class Client:
    """An HTTP client of one router."""

    def __init__(self, router: Router, session: aiohttp.ClientSession) -> None:
        self.router = router
        self.session = session
        self.url = f"http://127.0.0.1:{router.port}"

    async def get(self, path: str, headers: Mapping[str, str] | None = None) -> Reply:
        async with self.session.get(self.url + path, headers=headers) as response:
            response_headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), response_headers

    async def text(self, path: str, headers: Mapping[str, str] | None = None) -> str:
        async with self.session.get(self.url + path, headers=headers) as response:
            assert response.status == 200
            return await response.text()

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        data: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            data = {"data": body}
            headers = {"Content-Type": "application/json", **(headers or {})}
        async with self.session.post(self.url + path, headers=headers, **data) as response:
            response_headers = {name.lower(): value for name, value in response.headers.items()}
            return response.status, await response.json(), response_headers

    async def ready(self, nodes: int) -> None:
        view = self.router.view
        await until(lambda: len(list(view.ready())) == nodes)

    def dial(self, address: str) -> None:
        """Connect to a node, as discovery does for each address that it finds."""
        self.router._table.ensure_link(address)

    # --- the router's own reports -----------------------------------------------------------------

    async def pool(self) -> Any:
        status, pool, _ = await self.get("/pool", self._key())
        assert status == 200, pool
        return pool

    async def node(self, name: str) -> Any:
        """The node's entry in /pool."""
        [entry] = [node for node in (await self.pool())["nodes"] if node["id"] == name]
        return entry

    async def names(self) -> list[str]:
        """Names of the nodes in /pool."""
        return [node["id"] for node in (await self.pool())["nodes"]]

    async def chunks(self, name: str) -> int:
        """Number of chunks that the router believes are in the node's cache."""
        return int((await self.node(name))["cache"]["chunks"])

    async def booked(self) -> int:
        """Number of requests booked on all nodes."""
        return sum(node["booked"]["requests"] for node in (await self.pool())["nodes"])

    async def state(self, name: str) -> str:
        return str((await self.node(name))["state"])

    async def epoch(self, name: str) -> str:
        return str((await self.node(name))["epoch"])

    async def unreachable(self) -> list[str]:
        """Addresses of unreachable nodes."""
        return [entry["address"] for entry in (await self.pool())["unreachable"]]

    async def figure(self, name: str) -> float:
        """Sum of a metric's samples, or of those with the labels in `name`."""
        page = await self.text("/metrics", self._key())
        rows = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, rows))

    async def unfinished(self) -> int:
        """Number of unfinished requests, placed or not."""
        return int((await self.pool())["totals"]["requests_running"])

    async def answering(self) -> int:
        """Number of HTTP calls that are being answered."""
        return int(await self.figure("baton_router_requests_running"))

    async def queued(self) -> int:
        """Number of HTTP calls that wait because every node is full."""
        return int(await self.figure("baton_router_admission_queue"))

    async def held(self) -> int:
        """Number of requests that wait for a node."""
        return int(await self.figure("baton_router_requests_held"))

    def _key(self) -> dict[str, str]:
        key = self.router.settings.link_token
        return {"Authorization": f"Bearer {key}"} if key else {}


# --- routers --------------------------------------------------------------------------------------


@asynccontextmanager
async def running(*nodes: FakeNode, **settings: Any) -> AsyncIterator[Client]:
    """A router to which all these nodes are ready. `settings` are fields of RouterSettings, but
    `tunables` only those that differ from TUNABLES."""
    options: dict[str, Any] = {"port": 0}
    options["nodes"] = tuple(node.address for node in nodes)
    if "api_keys" in settings:
        options["link_token"] = "t0ken-of-the-tests"  # also grants access to /pool and /metrics
    options["tunables"] = msgspec.structs.replace(TUNABLES, **settings.pop("tunables", {}))
    async with connected(RouterSettings(**(options | settings))) as client:
        await client.ready(len(nodes))
        yield client


@asynccontextmanager
async def connected(settings: RouterSettings, **parts: Any) -> AsyncIterator[Client]:
    """A client of a new router. `parts` are the router's other arguments."""
    async with Router(settings, **parts) as router, aiohttp.ClientSession() as session:
        yield Client(router, session)


@asynccontextmanager
async def half_answered(
    decode: FakeNode, *more: FakeNode, **settings: Any
) -> AsyncIterator[tuple[Client, asyncio.Task[Reply]]]:
    """The router has half of one request's answer from `decode`, which then falls silent."""
    decode.script.run = "half"
    async with running(decode, *more, **settings) as client:
        answer = completing(client)
        await half_sent(client)
        yield client, answer


@asynccontextmanager
async def handing_off(
    decode: FakeNode, prefill: FakeNode, **settings: Any
) -> AsyncIterator[tuple[Client, asyncio.Task[Reply]]]:
    """Both nodes have their job for one request's hand-off, and `prefill` does not answer."""
    prefill.script.prefill = "silent"
    async with running(decode, prefill, handoff="always", **settings) as client:
        answer = completing(client)
        await until(lambda: prefill.got_of(PrefillJob) and decode.got_of(RunJob))
        yield client, answer


async def join(client: Client, node: FakeNode) -> None:
    """Connect the router to one more node, and wait until it is ready."""
    client.dial(node.address)
    await until(lambda: is_ready(client, node))


async def drain_as_replaced(client: Client, *nodes: FakeNode, leaving: bool = True) -> None:
    """Drain the nodes with deadline 0, as replaced by r2."""
    for node in nodes:
        body = {"deadline_s": 0, "replaced_by": "r2"}
        assert (await client.post(f"/nodes/{node.report.node}/drain", body))[0] == 200
        if leaving:
            await node.say_load("draining", leaving=True)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- requests and answers -------------------------------------------------------------------------


def ask(**fields: Any) -> dict[str, Any]:
    """A body for /v1/completions."""
    return {"prompt": "Say hello", "max_tokens": 50, "return_token_ids": True} | fields


def completing(client: Client, **fields: Any) -> asyncio.Task[Reply]:
    return asyncio.create_task(client.post(COMPLETIONS, ask(**fields)))


def text_of(answer: Reply) -> str:
    """Check an answer's other fields, and return its text."""
    status, body, _ = answer
    assert status == 200, body
    (choice,) = body["choices"]
    assert bytes(choice["token_ids"]) == choice["text"].encode()
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(choice["text"])
    reply: str = choice["text"]
    return reply


async def stream_events(client: Client, **fields: Any) -> list[Any]:
    """All events of one stream, parsed; "[DONE]" stays a string."""
    body = ask(stream=True, **fields)
    async with client.session.post(client.url + COMPLETIONS, json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(event) if event.startswith("{") else event for event in events]


async def streamed(client: Client) -> str:
    """Read a stream, check that it ends with [DONE], and return its text."""
    *events, end = await stream_events(client)
    assert end == "[DONE]"
    return "".join(event["choices"][0]["text"] for event in events)


async def explanation_of(client: Client, request_id: str) -> Any:
    """What GET /requests/{id} says of a request."""
    status, explanation, _ = await client.get(f"/requests/{request_id}")
    assert status == 200, explanation
    return explanation


# --- what routers and nodes know ------------------------------------------------------------------


def records(client: Client) -> list[RequestRecord]:
    return [request.record for request in client.router.dispatcher.in_flight.values()]


async def half_sent(client: Client) -> None:
    """Wait until the router has everything that a node sends before it falls silent mid-reply."""
    half = list(REPLY.encode()[: len(REPLY) // 2])
    await until(
        lambda: any(all(ids == half for ids in record.outputs) for record in records(client))
    )


def only_job(node: FakeNode, attempt: int = 1) -> RunJob:
    jobs: list[RunJob] = node.got_of(RunJob)
    (job,) = [job for job in jobs if job.request.attempt == attempt]
    return job


def is_ready(client: Client, node: FakeNode) -> bool:
    return any(view.report.node == node.report.node for view in client.router.view.ready())
