"""Cold start: requests for a pool without nodes are held until a node is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton_protocol.ids import Fingerprint
from baton_protocol.store import LATENCY_BOUNDS_S, Role
from baton_router.settings import RouterSettings, Tunables
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.nodes.processes import free_port
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

WAIT_S = 180.0
BODY = {"prompt": "x", "return_token_ids": True}
REPLY = list(b"Hello, world!")
COMMENT = b": waiting\n"


@asynccontextmanager
async def pool_without_nodes(**settings: Any) -> AsyncIterator[tuple[pools.Client, int]]:
    """A router of a pool without nodes, and the port at which it tries to find one."""
    port = free_port()
    options: dict[str, Any] = {"nodes": (f"http://127.0.0.1:{port}",), "wake_wait_s": WAIT_S}
    options |= {"port": 0, "tunables": Tunables(reconnect_max_s=0.05)}
    async with pools.connected(RouterSettings(**(options | settings))) as client:
        yield client, port


@asynccontextmanager
async def node_at(
    port: int, name: str = "decode-0", role: Role = "decode", **report: Any
) -> AsyncIterator[FakeNode]:
    node = FakeNode(name, role, **report)
    await node.start(port)
    try:
        yield node
    finally:
        await node.stop()


@asynccontextmanager
async def held(client: pools.Client, path: str, body: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """Send a request and wait until it is held; yields the task with its answer."""
    task = asyncio.create_task(client.post(path, body))
    try:
        await until(lambda: client.router.report().held or task.done())
        assert not task.done(), task.result()
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_pool_without_nodes_is_ready_if_the_router_holds_requests() -> None:
    async with pool_without_nodes() as (client, _):
        assert (await client.get("/ready"))[:2] == (200, {"ready": True, "reason": ""})
    async with pool_without_nodes(wake_wait_s=0.0) as (client, _):
        assert (await client.get("/ready"))[0] == 503
        status, body, _ = await client.post("/v1/completions", BODY)
        assert (status, body["error"]["code"]) == (503, "unavailable")


async def test_the_first_ready_node_answers_a_held_request() -> None:
    async with (
        pool_without_nodes() as (client, port),
        held(client, "/v1/completions", BODY) as answer,
    ):
        assert client.router.report().live == 0
        async with node_at(port):
            status, body, headers = await answer
        assert (status, body["choices"][0]["token_ids"]) == (200, REPLY)
        assert headers["x-baton-placement"].startswith("prefill=- decode=decode-0 ")
        assert await client.held() == 0


async def test_the_time_held_counts_in_ttft_but_not_towards_the_request_timeout() -> None:
    async with (
        pool_without_nodes(request_timeout_s=3.0) as (client, port),
        held(client, "/v1/completions", BODY) as answer,
    ):
        await asyncio.sleep(3.2)
        async with node_at(port):
            status, _, _ = await answer
        assert status == 200
        counts = zip(LATENCY_BOUNDS_S, client.router.report().ttft_counts, strict=False)
        assert not any(count for bound, count in counts if bound <= 0.5)


async def test_a_held_stream_gets_keep_alive_comments_and_then_its_tokens() -> None:
    async with pool_without_nodes(keepalive_s=0.05) as (client, port):
        url, body = client.url + "/v1/completions", BODY | {"stream": True}
        async with client.session.post(url, json=body) as response:
            assert response.status == 200
            reply = "prefill=- decode=- reason=waiting: the pool has no ready node yet"
            assert response.headers["x-baton-placement"] == reply
            for _ in range(2):
                assert await response.content.readline() == COMMENT
                assert await response.content.readline() == b"\n"
            async with node_at(port):
                rest = await response.text()
    assert rest.count('"token_ids"') == len(REPLY)
    assert rest.endswith("data: [DONE]\n\n")


async def test_a_request_that_only_the_model_s_limits_refuse_fails_once_a_node_is_ready() -> None:
    async with pool_without_nodes() as (client, port):
        long = {"prompt": "x" * 300}
        async with held(client, "/v1/completions", long) as answer, node_at(port):
            status, body, _ = await answer
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_refusal_after_a_comment_is_an_error_event() -> None:
    async with pool_without_nodes(keepalive_s=0.05) as (client, port):
        body = {"prompt": "x" * 300, "stream": True}
        async with client.session.post(client.url + "/v1/completions", json=body) as response:
            assert await response.content.readline() == COMMENT
            async with node_at(port):
                rest = await response.text()
        page = await (await client.session.get(client.url + "/metrics")).text()
    assert '"code":"context_length_exceeded"' in rest.rpartition("data: ")[2]
    assert "[DONE]" not in rest
    assert 'baton_router_requests_total{code="400",endpoint="completions"} 1.0' in page


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", b"{", None),
        ("/v1/completions", {"prompt": 5}, "prompt"),
        ("/v1/completions", {"prompt": "x", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 17}, "min_tokens"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {"messages": []},
            },
            "chat_template_kwargs",
        ),
    ],
)
async def test_a_request_that_no_model_accepts_is_refused_at_once(
    path: str, body: Any, param: Any
) -> None:
    async with pool_without_nodes() as (client, _):
        status, reply, _ = await client.post(path, body)
    assert (status, reply["error"]["param"]) == (400, param)


async def test_a_chat_with_min_tokens_is_held_while_no_model_limits_its_length() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "min_tokens": 5}
    async with (
        pool_without_nodes() as (client, port),
        held(client, "/v1/chat/completions", body) as answer,
    ):
        async with node_at(port):
            status, _, _ = await answer
        assert status == 200


async def test_a_request_for_an_unknown_model_name_is_not_held() -> None:
    async with pool_without_nodes(served_model_name=("mine",)) as (client, _):
        status, reply, _ = await client.post("/v1/completions", BODY | {"model": "yours"})
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert [model["id"] for model in (await client.get("/v1/models"))[1]["data"]] == ["mine"]


async def test_without_a_node_in_time_a_held_request_gets_a_retryable_503() -> None:
    async with pool_without_nodes(wake_wait_s=0.2) as (client, _):
        status, reply, headers = await client.post("/v1/completions", BODY)
    assert (status, reply["error"]["code"]) == (503, "unavailable")
    assert "no node was ready within 0.2 s (nodes: none)" in reply["error"]["message"]
    assert int(headers["retry-after"]) >= 1
    assert headers["x-baton-placement"] == "prefill=- decode=- reason=refused: unavailable"


async def test_a_disconnect_ends_the_hold() -> None:
    async with pool_without_nodes() as (client, _):
        for body in (BODY, BODY | {"stream": True}):
            async with held(client, "/v1/completions", body) as answer:
                answer.cancel()
                await until_is(client.held, 0)


async def test_at_shutdown_held_requests_fail_with_503() -> None:
    async with pool_without_nodes() as (client, _), held(client, "/v1/completions", BODY) as answer:
        await client.router.__aexit__(None, None, None)
        status, reply, _ = await answer
    assert (status, reply["error"]["code"]) == (503, "unavailable")
    assert "shutting down" in reply["error"]["message"]


async def test_a_pool_scaled_to_zero_again_keeps_its_model_name_and_holds_requests() -> None:
    async with pool_without_nodes(link_patience_s=0.0) as (client, port):
        async with held(client, "/v1/completions", BODY) as answer, node_at(port):
            await answer
        await client.ready(0)
        models = (await client.get("/v1/models"))[1]["data"]
        assert [model["id"] for model in models] == ["fake-model"]
        assert (await client.get("/ready"))[0] == 200
        async with held(client, "/v1/completions", BODY) as answer, node_at(port):
            status, body, _ = await answer
        assert (status, body["choices"][0]["token_ids"]) == (200, REPLY)


async def test_a_held_request_may_run_on_another_revision_than_the_last_one() -> None:
    long = {"prompt": "x" * 300, "max_tokens": 1}
    async with pool_without_nodes(link_patience_s=0.0) as (client, port):
        async with held(client, "/v1/completions", BODY) as answer, node_at(port):
            await answer
        await client.ready(0)
        other: dict[str, Any] = {"fingerprint": Fingerprint("e" * 32), "max_model_len": 512}
        async with (
            held(client, "/v1/completions", long) as answer,
            node_at(port, "decode-1", **other),
        ):
            status, body, _ = await answer
    assert (status, body["system_fingerprint"]) == (200, "e" * 32)


async def test_a_request_that_arrives_while_the_pool_starts_waits_for_its_role() -> None:
    ports = (free_port(), free_port())
    nodes = tuple(f"http://127.0.0.1:{port}" for port in ports)
    async with (
        pool_without_nodes(nodes=nodes, missing_role="queue", unready_wait_s=0.0) as (client, _),
        node_at(ports[0], "prefill-0", "prefill"),
    ):
        await client.ready(1)
        async with held(client, "/v1/completions", BODY) as answer, node_at(ports[1]):
            status, body, _ = await answer
    assert (status, body["choices"][0]["token_ids"]) == (200, REPLY)


@pytest.mark.parametrize("policy", ["queue", "fail"])
async def test_a_held_request_keeps_waiting_for_its_role_while_the_pool_starts(policy: str) -> None:
    ports = (free_port(), free_port())
    nodes = tuple(f"http://127.0.0.1:{port}" for port in ports)
    async with (
        pool_without_nodes(nodes=nodes, missing_role=policy, unready_wait_s=0.0) as (client, _),
        held(client, "/v1/completions", BODY) as answer,
        node_at(ports[0], "prefill-0", "prefill"),
    ):
        await client.ready(1)
        await until(lambda: client.router.report().requests_total == 1)
        assert await client.held() == 1
        async with node_at(ports[1]):
            status, body, _ = await answer
    assert (status, body["choices"][0]["token_ids"]) == (200, REPLY)
