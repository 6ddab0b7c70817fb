"""The API's routes apart from generation, and the shape of every error."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from baton_protocol.link import CacheEvents, RunJob
from baton_protocol.store import DataInstance
from tests.router import pools
from tests.support.nodes.fake_node import LAYOUT, FakeNode
from tests.support.waiting import until_is

pytestmark = pytest.mark.integration

COMPLETIONS = "/v1/completions"


async def test_malformed_bodies_are_400_in_openai_s_shape(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for data in (b"{", b"[]", b"", b'{"prompt": "x"} trailing'):
            status, body, headers = await client.post(COMPLETIONS, data)
            assert status == 400
            assert set(body["error"]) == {"message", "type", "param", "code", "doc"}
            assert body["error"]["code"] == "malformed_body"
            assert len(headers["x-baton-request-id"]) == 32
            assert headers["x-baton-placement"].startswith("prefill=- decode=- reason=refused")


async def test_unknown_routes_and_methods_are_json_errors(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        status, body, headers = await client.get("/nope")
        assert (status, body["error"]["code"]) == (404, "not_found")
        assert headers["x-baton-request-id"]
        status, body, headers = await client.get(COMPLETIONS)
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert headers["allow"] == "POST"


async def test_a_body_over_the_limit_is_413(decode: FakeNode) -> None:
    async with pools.running(decode, max_body_bytes=1000) as client:
        status, body, _ = await client.post(COMPLETIONS, {"prompt": "x" * 2000})
        assert (status, body["error"]["code"]) == (413, "request_too_large")
        assert "1000" in body["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": [1, 300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"max_tokens": 1000}, "max_tokens"),
    ],
)
async def test_a_request_beyond_the_model_s_limits_is_400_and_reaches_no_node(
    decode: FakeNode, changes: dict[str, Any], param: str
) -> None:
    async with pools.running(decode) as client:
        status, body, _ = await client.post(COMPLETIONS, {"prompt": "x"} | changes)
        assert (status, body["error"]["param"]) == (400, param)
        assert decode.got_of(RunJob) == []


async def test_reserved_chat_template_kwargs_are_a_400(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        for reserved in ("messages", "add_generation_prompt"):
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "chat_template_kwargs": {reserved: 1},
            }
            status, reply, _ = await client.post("/v1/chat/completions", body)
            assert (status, reply["error"]["param"]) == (400, "chat_template_kwargs")


async def test_a_long_prompt_is_tokenized_and_hashed_like_a_short_one() -> None:
    node = FakeNode("decode-0", "decode", max_model_len=50_000)
    await node.start()
    async with pools.running(node) as client:
        text = "ab" * 10_000
        status, body, _ = await client.post(COMPLETIONS, {"prompt": text, "max_tokens": 1})
        assert (status, body["usage"]["prompt_tokens"]) == (200, 20_000)
        assert bytes(node.got_of(RunJob)[0].request.prompt_ids) == text.encode()
    await node.stop()


async def test_chat_without_the_generation_prompt_has_fewer_tokens(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        counts = []
        for add_prompt in (True, False):
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "add_generation_prompt": add_prompt,
                "max_tokens": 1,
            }
            reply = (await client.post("/v1/chat/completions", body))[1]
            counts.append(reply["usage"]["prompt_tokens"])
        assert counts[0] > counts[1]


async def test_pool_shows_nodes_loads_caches_and_totals(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill) as client:
        await prefill.say_load(published_bytes_total=7, queued_tokens=3, total_blocks=9)
        await decode.say_load(fetched_bytes_total=5, published_bytes_total=1)
        await prefill.say(CacheEvents(prefill.report.epoch, stored=(b"a" * 16, b"b" * 16)))  # type: ignore[arg-type]
        await until_is(lambda: client.chunks("prefill-0"), 2)
        status, pool, _ = await client.get("/pool")
        assert status == 200
        assert [node["id"] for node in pool["nodes"]] == ["decode-0", "prefill-0"]
        node = pool["nodes"][1]
        assert (node["role"], node["pid"], node["epoch"]) == ("prefill", 1, "epoch-1")
        assert (node["state"], node["in_use"]) == ("ready", True)
        assert node["address"] == prefill.address
        assert node["load"]["queued_tokens"] == 3
        assert node["cache"] == {
            "chunks": 2,
            "total_blocks": 9,
            "free_blocks": 0,
            "cached_blocks": 0,
            "host_blocks": 0,
            "host_total_blocks": 0,
        }
        assert node["layout"]["chunk_bytes"] == LAYOUT.chunk_bytes
        assert node["speeds"]["prefill_tokens_per_s"] == 10_000.0
        assert pool["fingerprint"] == "f" * 32
        assert pool["totals"]["published_bytes_total"] == 8
        assert pool["totals"]["nodes"] == 2
        assert pool["store"] == {
            "configured": False,
            "reachable": None,
            "chunk_waste": LAYOUT.waste,
            "instances": [],
        }


async def test_pool_shows_the_data_servers_as_their_nodes_see_them(
    decode: FakeNode, prefill: FakeNode
) -> None:
    first, full, unreachable = (
        DataInstance(used_bytes=1, limit_bytes=8, get_bytes_per_s=1e9, get_latency_ms=0.2),
        DataInstance(used_bytes=8, limit_bytes=8, evicted_keys=3, put_trouble="full"),
        DataInstance(trouble="connection refused", put_trouble="connection refused"),
    )
    async with pools.running(decode, prefill) as client:

        async def servers(name: str) -> int:
            return len((await client.node(name))["instances"])

        await prefill.say_load(instances=(first, unreachable))
        await until_is(lambda: servers("prefill-0"), 2)
        await decode.say_load(instances=(first, full))
        await until_is(lambda: servers("decode-0"), 2)
        _, pool, _ = await client.get("/pool")
        instances = {node["id"]: node["instances"] for node in pool["nodes"]}
        assert instances["decode-0"][0] == msgspec.structs.asdict(first)
        assert [each["trouble"] for each in instances["prefill-0"]] == ["", "connection refused"]
        # Sizes come from the latest report; troubles are listed per node.
        assert pool["store"]["instances"] == [
            {
                "used_bytes": 1,
                "limit_bytes": 8,
                "evicted_keys": 0,
                "trouble": {},
                "put_trouble": {},
            },
            {
                "used_bytes": 8,
                "limit_bytes": 8,
                "evicted_keys": 3,
                "trouble": {"prefill-0": "connection refused"},
                "put_trouble": {"prefill-0": "connection refused", "decode-0": "full"},
            },
        ]
        decode.cut_links()
        await decode.stop()
        await until_is(lambda: client.state("decode-0"), "lost")
        _, pool, _ = await client.get("/pool")
        assert [each["used_bytes"] for each in pool["store"]["instances"]] == [1, 0]


async def test_metrics_contain_the_router_s_and_its_nodes_counters(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await decode.say_load(published_bytes_total=7, fetched_bytes_total=5, reused_chunks_total=2)
        body = {"prompt": "x", "max_tokens": 3}
        await client.post(COMPLETIONS, body)
        await client.post(COMPLETIONS, b"{")
        async with client.session.get(client.url + "/metrics") as response:
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            page = await response.text()
        for line in (
            'baton_kv_published_bytes_total{node="decode-0"} 7.0',
            'baton_kv_fetched_bytes_total{node="decode-0"} 5.0',
            'baton_kv_chunks_reused_total{node="decode-0"} 2.0',
            'baton_node_ready{node="decode-0",role="decode"} 1.0',
            'baton_router_requests_total{code="200",endpoint="completions"} 1.0',
            'baton_router_requests_total{code="400",endpoint="completions"} 1.0',
            'baton_router_placements_total{reason="no_prefill"} 1.0',
            "baton_router_time_to_first_token_seconds_count 1.0",
            "baton_router_inter_token_latency_seconds_count 2.0",
            "baton_router_e2e_request_latency_seconds_count 1.0",
            "baton_router_requests_running 0.0",
        ):
            assert line + "\n" in page, line


async def test_a_request_without_a_model_name_gets_the_pool_s_model(decode: FakeNode) -> None:
    async with pools.running(decode, served_model_name=("mine",)) as client:
        for model in (None, "", "mine"):
            body = {"prompt": "x", "max_tokens": 1, "model": model}
            assert (await client.post(COMPLETIONS, body))[1]["model"] == "mine"
        body = {"prompt": "x", "model": "fake-model"}
        assert (await client.post(COMPLETIONS, body))[0] == 404


async def test_usage_in_each_event_may_be_forced(decode: FakeNode) -> None:
    async with pools.running(decode, enable_force_include_usage=True) as client:
        for options in (None, {"include_usage": False}):
            *events, end = await pools.stream_events(client, stream_options=options)
            assert (end, events[-1]["choices"]) == ("[DONE]", [])
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts)
            assert counts[-1] == len(pools.REPLY)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY


async def test_default_seeds_differ_and_a_client_s_seed_is_kept(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await client.post(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 1})
        await client.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "seed": 7})
        seeds = [job.request.params.seed for job in decode.got_of(RunJob)]
        assert len(set(seeds)) == 3
        assert seeds[2] == 7


async def test_a_disconnect_during_a_write_is_logged_as_499_and_not_as_an_error(
    decode: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(response: web.StreamResponse, data: bytes) -> None:
        raise ConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", fail)
    async with pools.running(decode) as client:
        body = {"prompt": "x", "stream": True}
        with contextlib.suppress(aiohttp.ClientError):
            async with client.session.post(client.url + COMPLETIONS, json=body) as response:
                await response.read()
        page = await (await client.session.get(client.url + "/metrics")).text()
        assert await client.unfinished() == 0
    assert 'code="499"' in page
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_body_that_does_not_match_its_content_encoding_is_a_400(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        body = b'{"prompt": "x"}'
        async with client.session.post(
            client.url + COMPLETIONS, data=body, headers=headers
        ) as response:
            reply = await response.json()
    assert (response.status, reply["error"]["code"]) == (400, "malformed_body")


async def test_the_placement_header_of_a_call_with_many_prompts_is_shortened(
    decode: FakeNode,
) -> None:
    async with pools.running(decode) as client:
        body = {"prompt": ["x"] * 300, "max_tokens": 1}
        status, reply, headers = await client.post(COMPLETIONS, body)
    assert (status, len(reply["choices"])) == (200, 300)
    placement = headers["x-baton-placement"]
    assert placement.startswith("prefill=- decode=decode-0 reason=")
    assert placement.endswith("; and 284 more")
    assert len(placement) < 4096


async def test_a_model_s_created_date_is_the_oldest_one_its_nodes_report(decode: FakeNode) -> None:
    newer = FakeNode("decode-1", "decode", model_made=1_700_000_500)
    older = FakeNode("decode-2", "decode", model_made=1_700_000_000)
    without_date = decode  # like a node of an older version
    async with newer, older, pools.running(without_date, newer, older) as client:
        for _ in range(2):
            [model] = (await client.get("/v1/models"))[1]["data"]
            assert model["created"] == 1_700_000_000
            assert (await client.get("/v1/models/fake-model"))[1] == model


async def test_without_a_reported_date_a_model_s_created_date_is_the_router_s_start(
    decode: FakeNode,
) -> None:
    before = int(time.time())
    async with pools.running(decode) as client:
        [first] = (await client.get("/v1/models"))[1]["data"]
        assert before <= first["created"] <= time.time()
        await decode.stop()
        await client.ready(0)
        [without_nodes] = (await client.get("/v1/models"))[1]["data"]
        assert without_nodes["created"] == first["created"]
