"""Sends requests to a router whose fake nodes fail, and inspects the router's records.

In: the client of tests/router/conftest. Out: answers, after checks that they are complete.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from baton_protocol.link import RunJob
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

REPLY = "Hello, world!"
LONG = "x" * 200


def ask(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Say hello", "max_tokens": 50, "return_token_ids": True} | fields


def completing(client: Any, **fields: Any) -> asyncio.Task[tuple[int, Any, dict[str, str]]]:
    return asyncio.create_task(client.post("/v1/completions", ask(**fields)))


def text(answer: tuple[int, Any, dict[str, str]]) -> str:
    """Check an answer's other fields, and return its text."""
    status, body, _ = answer
    assert status == 200, body
    (choice,) = body["choices"]
    assert bytes(choice["token_ids"]) == choice["text"].encode()
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len(choice["text"])
    reply: str = choice["text"]
    return reply


async def streamed(client: Any) -> str:
    """Read a stream, check that it ends with [DONE], and return its text."""
    url, body = client.url + "/v1/completions", ask(stream=True)
    async with client.session.post(url, json=body) as response:
        lines = (await response.text()).split("\n\n")
    *events, end = [line.removeprefix("data: ") for line in lines if line]
    assert end == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def records(client: Any) -> list[Any]:
    return [request.record for request in client.router.dispatcher.in_flight.values()]


async def half_sent(client: Any) -> None:
    """Wait until the router has everything that a node sends before it falls silent mid-reply."""
    half = list(REPLY.encode()[: len(REPLY) // 2])
    await until(lambda: any(all(ids == half for ids in r.outputs) for r in records(client)))


def only(node: FakeNode, attempt: int = 1) -> Any:
    (job,) = [job for job in node.got_of(RunJob) if job.request.attempt == attempt]
    return job


def ready(client: Any, node: FakeNode) -> bool:
    return any(view.report.node == node.report.node for view in client.router.view.ready())


async def figure(client: Any, name: str) -> float:
    page = await (await client.session.get(client.url + "/metrics")).text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


async def join(client: Any, node: FakeNode) -> None:
    client.dial(node.address)
    await until(lambda: ready(client, node))


async def replace(client: Any, *nodes: FakeNode, leaving: bool = True) -> None:
    """Drain the nodes with deadline 0, as replaced by r2."""
    for node in nodes:
        body = {"deadline_s": 0, "replaced_by": "r2"}
        assert (await client.post(f"/nodes/{node.report.node}/drain", body))[0] == 200
        if leaving:
            await node.say_load("draining", leaving=True)
