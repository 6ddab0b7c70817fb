"""What monitors and load balancers ask a router under vLLM's names: version, load, ping, the load
header of answers, and /metrics?names=vllm."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton_protocol.vllm_metrics import CACHE_CONFIG, LOAD_ALIASES
from baton_router.metrics.vllm_names import ROUTER, ROUTER_ALIASES, TOKENS
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

FORMAT, LOAD = "endpoint-load-metrics-format", "endpoint-load-metrics"
VLLM = "/metrics?names=vllm"
AS_TEXT = "TEXT named_metrics.kv_cache_usage_perc=0.75, named_metrics.num_requests_waiting=5.0"
Samples = dict[tuple[str, str], float]


async def samples(client: pools.Client) -> Samples:
    """The page with vLLM's names, as Prometheus reads it: values by name and engine. Samples that
    differ in other labels are added up."""
    found: Samples = {}
    for family in text_string_to_metric_families(await client.text(VLLM)):
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake-model", sample
            key = (sample.name, sample.labels["engine"])
            found[key] = found.get(key, 0.0) + sample.value
    return found


async def test_version_load_and_ping(decode: FakeNode) -> None:
    async with pools.half_answered(decode) as (client, answer):
        assert (await client.get("/version"))[:2] == (200, {"version": version("baton-serve")})
        assert (await client.get("/load"))[:2] == (200, {"server_load": 1})
        ready = (200, {"ready": True, "reason": ""})
        assert (await client.get("/ping"))[:2] == ready
        async with client.session.post(client.url + "/ping", json={}) as response:
            assert (response.status, await response.json()) == ready
        answer.cancel()
        await until_is(lambda: _load(client), 0)
        client.router.api.generation.draining = True
        status, reply, _ = await client.get("/ping")
        assert (status, reply["reason"]) == (503, "the router is shutting down")


async def _load(client: pools.Client) -> int:
    return int((await client.get("/load"))[1]["server_load"])


async def test_the_load_needs_an_admins_key_if_there_are_keys(
    decode: FakeNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("acme sk-key-of-acme\nops sk-key-of-ops admin\n")
    async with pools.running(decode, api_keys=str(keys)) as client:
        for key, status in (("", 401), ("sk-key-of-acme", 403), ("sk-key-of-ops", 200)):
            assert (await client.get("/load", pools.bearer(key)))[0] == status
        assert (await client.get("/version"))[0] == (await client.get("/ping"))[0] == 200
        for key, status in (("sk-of-nobody", 401), ("sk-key-of-acme", 200)):
            headers = pools.bearer(key) | {FORMAT: "TEXT"}
            answer = await client.post(pools.COMPLETIONS, pools.ask(), headers)
            assert (answer[0], LOAD in answer[2]) == (status, status == 200)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        ("TEXT", AS_TEXT),
        ("json", {"kv_cache_usage_perc": 0.75, "num_requests_waiting": 5.0}),
        ("BIN", None),
        ("", None),
    ],
)
async def test_an_answer_carries_the_pools_load_if_the_request_asks_for_it(
    decode: FakeNode, wanted: str, shown: Any, stream: bool
) -> None:
    async with pools.running(decode) as client:
        await decode.say_load(free_blocks=25, total_blocks=100, waiting=3, parked=2)
        await until(lambda: any(view.report.load.parked for view in client.router.view.ready()))
        body, headers = pools.ask(stream=stream), {FORMAT: wanted}
        url = client.url + pools.COMPLETIONS
        async with client.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200
            header = response.headers.get(LOAD)
            await response.read()
        if isinstance(shown, dict):
            assert header is not None
            kind, _, report = header.partition(" ")
            assert (kind, json.loads(report)) == ("JSON", {"named_metrics": shown})
        else:
            assert header == shown
        assert LOAD not in (await client.get("/v1/models", headers))[2]


async def test_the_figures_under_vllms_names_are_those_of_the_pool(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill) as client:
        await decode.say_load(
            free_blocks=25,
            total_blocks=100,
            waiting=3,
            parked=2,
            running=7,
            prompt_tokens_total=90,
            cached_prompt_tokens_total=40,
            fetched_prompt_tokens_total=30,
        )
        await until(lambda: client.router.view.nodes[decode.report.node].report.load.running == 7)
        assert pools.text_of(await pools.completing(client)) == pools.REPLY
        found = await samples(client)
        expected = {
            ("vllm:num_requests_running", "decode-0"): 7,
            ("vllm:num_requests_waiting", "decode-0"): 5,
            ("vllm:num_requests_waiting", ROUTER): 0,
            ("vllm:kv_cache_usage_perc", "decode-0"): 0.75,
            ("vllm:kv_cache_usage_perc", "prefill-0"): 0,
            ("vllm:prefix_cache_queries_total", "decode-0"): 90,
            ("vllm:prefix_cache_hits_total", "decode-0"): 40,
            ("vllm:external_prefix_cache_queries_total", "decode-0"): 50,
            ("vllm:external_prefix_cache_hits_total", "decode-0"): 30,
            ("vllm:time_to_first_token_seconds_count", ROUTER): 1,
            ("vllm:e2e_request_latency_seconds_count", ROUTER): 1,
            ("vllm:request_success_total", ROUTER): 1,
            ("vllm:prompt_tokens_total", ROUTER): len("Say hello"),
            ("vllm:generation_tokens_total", ROUTER): len(pools.REPLY),
        }
        assert {key: found[key] for key in expected} == expected
        gaps = found["vllm:inter_token_latency_seconds_count", ROUTER]
        assert gaps == found["vllm:time_per_output_token_seconds_count", ROUTER]
        page = await client.text(VLLM)
        assert 'finished_reason="stop"' in page
        assert (
            'block_size="4",engine="decode-0",model_name="fake-model",num_gpu_blocks="100"' in page
        )
        assert "baton" not in page
        shown = {family.name for family in text_string_to_metric_families(page)}
        declared = {*LOAD_ALIASES, *ROUTER_ALIASES, *TOKENS, CACHE_CONFIG}
        assert shown == {name.removesuffix("_total") for name in declared}


@pytest.mark.parametrize("query", ["names=sglang", "names=", "names=VLLM", "names=vllm&names=vllm"])
async def test_other_names_of_metrics_are_a_400(decode: FakeNode, query: str) -> None:
    async with pools.running(decode) as client:
        status, reply, _ = await client.get(f"/metrics?{query}")
        assert (status, reply["error"]["param"]) == (400, "names")
        assert "use baton or vllm" in reply["error"]["message"]
        names = [await _names(client, path) for path in ("/metrics", "/metrics?names=baton")]
        assert names[0] == names[1]
        assert all(name.startswith("baton_") for name in names[0])


async def _names(client: pools.Client, path: str) -> set[str]:
    page = await client.text(path)
    return {family.name for family in text_string_to_metric_families(page)}
