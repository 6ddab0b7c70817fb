"""GET /requests/{id}: the explanation of how a request was served, who may read it, and that it
contains nothing from the client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton_protocol.errors import NotFound
from baton_protocol.link import JobFailed, RequestStats, RunJob
from baton_router.auth import Tenant
from baton_router.observability.explanation import ExplanationHistory, encode_explanation
from baton_router.openai.chat import CHAT
from baton_router.requests.context import RequestContext
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until, until_is

pytestmark = pytest.mark.integration

SECRET = "nobody may read this"
STATS = RequestStats(
    prompt_tokens=9, cached_tokens=4, computed_tokens=5, queue_ms=1.5, prefill_ms=2.5
)


async def complete(client: pools.Client, **more: Any) -> tuple[int, Any, str]:
    """Send one call: its status, its body and its id."""
    body = {"prompt": "Say hello", "max_tokens": 50} | more
    status, answer, headers = await client.post("/v1/completions", body)
    return status, answer, headers["x-baton-request-id"]


async def test_the_explanation_of_a_whole_request_is_complete(decode: FakeNode) -> None:
    decode.script.stats = STATS
    async with pools.running(decode) as client:
        _, body, request_id = await complete(client)
        explanation = await pools.explanation_of(client, request_id)
    assert (explanation["id"], explanation["endpoint"], explanation["model"]) == (
        request_id,
        "completions",
        "fake-model",
    )
    assert (explanation["state"], explanation["status"], explanation["error"]) == (
        "ended",
        200,
        None,
    )
    assert explanation["prompt_tokens"] == body["usage"]["prompt_tokens"]
    assert (
        explanation["completion_tokens"] == body["usage"]["completion_tokens"] == len(pools.REPLY)
    )
    assert (
        0 <= explanation["prepared_ms"] <= explanation["first_token_ms"] <= explanation["total_ms"]
    )
    (request,) = explanation["requests"]
    assert (request["id"], request["state"], request["waits"]) == (request_id, "done", [])
    (attempt,) = request["attempts"]
    assert (attempt["attempt"], attempt["prefill"], attempt["decode"]) == (1, None, "decode-0")
    assert attempt["reason"] == "no_prefill"
    assert attempt["explanation"].endswith("no ready prefill node")
    assert attempt["known"]["chunks"] == 1  # 9 tokens, 8 to a chunk
    assert attempt["known"]["stored_chunks"] == 0
    assert attempt["predicted_ms"] >= attempt["expected_ms"] > 0
    assert attempt["error_ms"] == pytest.approx(
        attempt["decoding_ms"] - attempt["expected_ms"], abs=0.01
    )
    assert attempt["first_token_ms"] == attempt["decoding_ms"]
    (measured,) = attempt["measured"]
    assert (measured["node"], measured["queue_ms"], measured["prefill_ms"]) == (
        "decode-0",
        1.5,
        2.5,
    )
    assert attempt["fetch_or_compute"]["did"] == "nothing to fetch"
    assert (attempt["ended"]["why"], attempt["ended"]["node"]) == ("done", None)


async def test_the_explanation_of_a_split_request_has_both_nodes(
    decode: FakeNode, prefill: FakeNode
) -> None:
    prefill.script.stats = RequestStats(
        prompt_tokens=9, fetched_tokens=8, fetch_predicted_ms=1.0, compute_predicted_ms=2.0
    )
    decode.script.stats = RequestStats(drafted_tokens=7, accepted_drafts=5, forced_drafts=2)
    async with pools.running(decode, prefill, handoff="always") as client:
        _, _, request_id = await complete(client)
        explanation = await pools.explanation_of(client, request_id)
        assert await client.figure('baton_router_prediction_error_seconds_count{way="split"}') == 1
    (request,) = explanation["requests"]
    assert request["drafts"] == {"drafted": 7, "accepted": 5, "forced": 2}
    (attempt,) = request["attempts"]
    assert (attempt["prefill"], attempt["decode"]) == ("prefill-0", "decode-0")
    assert [figures["node"] for figures in attempt["measured"]] == ["prefill-0", "decode-0"]
    assert attempt["fetch_or_compute"]["did"] == "fetched"
    assert attempt["first_token_ms"] < attempt["decoding_ms"]


async def test_prediction_errors_are_counted_per_way(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await complete(client, prompt=["one prompt", "another"])
        name = "baton_router_prediction_error_seconds"
        assert await client.figure(f'{name}_count{{way="whole"}}') == 2
        assert await client.figure(f'{name}_sum{{way="whole"}}') > 0


async def test_a_failed_prefill_job_is_explained_and_counts_no_prediction_error(
    decode: FakeNode, prefill: FakeNode
) -> None:
    prefill.script.prefill = "fail"
    async with pools.running(decode, prefill, handoff="always") as client:
        _, _, request_id = await complete(client)
        explanation = await pools.explanation_of(client, request_id)
        page = await (await client.session.get(client.url + "/metrics")).text()
    (attempt,) = explanation["requests"][0]["attempts"]
    assert attempt["prefill_given_up_at_ms"] >= attempt["at_ms"]
    assert attempt["ended"]["why"] == "done"
    assert "baton_router_prediction_error_seconds_count{" not in page


async def test_the_explanation_has_the_lost_node_and_the_wait_for_another(
    decode: FakeNode, other: FakeNode
) -> None:
    async with pools.half_answered(decode) as (client, answer):
        await decode.stop()
        await client.ready(0)
        await pools.join(client, other)
        status, body, headers = await answer
        assert (status, body["choices"][0]["text"]) == (200, pools.REPLY)
        explanation = await pools.explanation_of(client, headers["x-baton-request-id"])
    (request,) = explanation["requests"]
    first, second = request["attempts"]
    assert (first["ended"]["why"], first["ended"]["node"]) == ("link", "decode-0")
    assert (second["decode"], second["reason"], second["attempt"]) == ("decode-1", "resumed", 2)
    assert request["waits"][0]["why"] == "the attempt on decode-0 ended (link)"
    assert second["at_ms"] >= first["ended"]["at_ms"] > first["at_ms"]


async def test_a_running_request_has_an_explanation_up_to_now(decode: FakeNode) -> None:
    async with pools.half_answered(decode) as (client, answer):
        (request,) = client.router.dispatcher.in_flight.values()
        explanation = await pools.explanation_of(client, request.id)
        assert (explanation["state"], explanation["status"]) == ("running", None)
        assert explanation["completion_tokens"] == len("Hello,")
        assert explanation["requests"][0]["state"] == "running"
        assert explanation["requests"][0]["attempts"][0]["ended"] is None
        failed = JobFailed(request.id, 1, decode.script.failure)
        await decode.say(failed)
        await answer
        explanation = await pools.explanation_of(client, request.id)
    assert (explanation["state"], explanation["status"], explanation["error"]) == (
        "ended",
        500,
        "engine_error",
    )
    assert explanation["requests"][0]["state"] == "failed"


async def test_a_waiting_request_s_explanation_has_the_reason(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        await decode.stop()
        await client.ready(0)
        answer = pools.completing(client)
        await until(
            lambda: [f for f in client.router.dispatcher.in_flight.values() if f.record.waits_for]
        )
        (request,) = client.router.dispatcher.in_flight.values()
        (explained,) = (await pools.explanation_of(client, request.id))["requests"]
        assert (explained["state"], explained["attempts"]) == ("waiting", [])
        assert explained["waits"][0]["why"] == "no node is ready (nodes: 1 lost)"
        await decode.restart("epoch-2")
        assert pools.text_of(await answer) == pools.REPLY


async def test_prompts_of_one_call_are_explained_together_or_one_by_one(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        _, body, request_id = await complete(client, prompt=["ab", "cde"])
        for name in (request_id, body["id"]):
            explanation = await pools.explanation_of(client, name)
            assert [request["id"][-2:] for request in explanation["requests"]] == ["-0", "-1"]
        (second,) = (await pools.explanation_of(client, f"{request_id}-1"))["requests"]
        assert (second["id"], second["prompt_tokens"]) == (f"{request_id}-1", 3)
        status, _, _ = await client.get(f"/requests/{request_id}-2")
        assert status == 404


async def test_a_refused_call_s_explanation_has_the_error_code(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        _, _, request_id = await complete(client, top_p=7)
        explanation = await pools.explanation_of(client, request_id)
    assert (explanation["status"], explanation["error"], explanation["requests"]) == (
        400,
        "invalid_value",
        [],
    )


async def test_an_unknown_id_is_a_404_that_states_how_many_requests_are_kept(
    decode: FakeNode,
) -> None:
    async with pools.running(decode, explain_requests=3) as client:
        status, body, _ = await client.get("/requests/" + "x" * 500)
    assert (status, body["error"]["code"]) == (404, "request_not_found")
    assert "the last 3 that ended" in body["error"]["message"]
    assert len(body["error"]["message"]) < 250


async def test_explanations_contain_nothing_from_the_client(
    decode: FakeNode, prefill: FakeNode
) -> None:
    async with pools.running(decode, prefill, handoff="always") as client:
        fields = {"prompt": SECRET, "stop": ["another secret"], "user": SECRET}
        _, _, good = await complete(client, **fields)
        _, _, bad = await complete(client, prompt=SECRET, model=SECRET)
        pages = [await pools.explanation_of(client, good), await pools.explanation_of(client, bad)]
    assert "secret" not in str(pages)
    assert SECRET not in str(pages)
    assert str(list(SECRET.encode()))[1:-1] not in str(pages)  # the prompt's token ids


async def test_a_request_id_starts_with_the_last_characters_of_its_router_s_name(
    decode: FakeNode,
) -> None:
    async with pools.running(decode) as client:
        _, pool, _ = await client.get("/pool")
        ids = [(await complete(client))[2] for _ in range(2)]
    assert ids[0] != ids[1]
    assert [request_id[:8] for request_id in ids] == [pool["router"][-8:]] * 2


async def test_a_tenant_may_read_only_its_own_requests(decode: FakeNode, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("acme key-of-acme\nglobex key-of-globex\n")
    async with pools.running(decode, api_keys=str(tmp_path / "keys")) as client:
        acme = {"Authorization": "Bearer key-of-acme"}
        globex = {"Authorization": "Bearer key-of-globex"}
        _, _, response_headers = await client.post("/v1/completions", {"prompt": "x"}, acme)
        path = f"{client.url}/requests/{response_headers['x-baton-request-id']}"
        statuses = []
        for headers in (acme, globex, {}):
            async with client.session.get(path, headers=headers) as response:
                statuses.append(response.status)
                body = await response.json()
        assert statuses == [200, 404, 401]
        assert body["error"]["code"] == "invalid_api_key"


def make_history(max_requests: int, max_bytes: int = 1 << 20) -> ExplanationHistory:
    return ExplanationHistory(max_requests, lambda: 2.0, max_bytes)


def make_context(name: str, tenant: str | None = "") -> RequestContext:
    return RequestContext(name, 1.0, CHAT, tenant=Tenant(tenant) if tenant is not None else None)


def test_an_admin_may_read_every_tenant_s_requests() -> None:
    history = make_history(2)
    history.begin_call(running := make_context("a", "acme"))
    assert history.find("a", Tenant("root", admin=True))["state"] == "running"
    with pytest.raises(NotFound):
        history.find("a", Tenant("globex"))
    history.end_call(running, 200)
    assert history.find("a", Tenant("root", admin=True))["tenant"] == "acme"
    with pytest.raises(NotFound):
        history.find("a", Tenant("globex"))


def test_the_oldest_explanation_is_forgotten_first() -> None:
    history = make_history(2)
    for name in "abc":
        history.end_call(make_context(name), 200)
    with pytest.raises(NotFound, match="the last 2 that ended"):
        history.find("a", Tenant())
    assert history.find("c", Tenant())["total_ms"] == 1000.0


def test_the_history_is_bounded_in_bytes() -> None:
    history = make_history(1000)
    history.end_call(make_context("a"), 200)
    size = history.bytes
    history = make_history(1000, max_bytes=3 * size + size // 2)  # the sizes differ by a digit
    for number in range(10):
        history.end_call(make_context(str(number)), 200)
    assert len(history) == 3
    assert 2 * size < history.bytes <= 3 * size + size // 2


def test_nothing_is_kept_with_limit_0_or_without_a_tenant() -> None:
    history = make_history(0)
    history.end_call(make_context("a"), 200)
    assert len(history) == 0
    history = make_history(2)
    history.end_call(make_context("a", None), 401)
    assert len(history) == 0


async def test_the_explanation_shows_a_disconnect(decode: FakeNode) -> None:
    decode.script.run = "silent"
    async with pools.running(decode) as client:
        body = {"prompt": "x", "stream": True}
        answer = asyncio.create_task(client.session.post(client.url + "/v1/completions", json=body))
        await until(lambda: decode.got_of(RunJob))
        (request,) = client.router.dispatcher.in_flight.values()
        answer.cancel()
        await until_is(client.unfinished, 0)
        explanation = await pools.explanation_of(client, request.id)
    assert (explanation["status"], explanation["requests"][0]["state"]) == (499, "left")


async def test_a_bug_in_the_explanations_does_not_fail_the_answer(
    decode: FakeNode,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise TypeError("our bug")

    async with pools.running(decode) as client:
        monkeypatch.setattr(client.router.api.generation.observers.explanations, "end_call", broken)
        status, body, request_id = await complete(client)
    assert (status, body["choices"][0]["text"]) == (200, pools.REPLY)
    (line,) = [
        record
        for record in caplog.records
        if "cannot record the request's explanation" in record.message
    ]
    assert vars(line)["request"] == request_id


def test_numpy_numbers_are_encoded_as_json_numbers() -> None:
    decoded = json.loads(encode_explanation({"cost": np.float64(1.5), "tokens": np.int64(3)}))
    assert decoded == {"cost": 1.5, "tokens": 3}
