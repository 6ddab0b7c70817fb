"""`baton explain`: the text of an explanation, and the errors without one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton_cli.commands.explain import ask, run
from baton_cli.commands.explain_options import ExplainOptions
from baton_cli.errors import CommandError
from baton_cli.terminal.explain_text import lines_of
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

PLACEMENT = {
    "queue_ms": 1.0,
    "compute_ms": 20.0,
    "fetch_ms": 2.0,
    "slowdown_ms": 5.0,
    "uncached": 9,
}
ATTEMPT: dict[str, Any] = {
    "attempt": 1,
    "at_ms": 1.25,
    "prefill": "prefill-0",
    "decode": "decode-0",
    "reason": "split",
    "explanation": "uncached 9 of 600 tokens, 28.0 ms; decode node alone 99.0 ms",
    "uncached_tokens": 9,
    "known": {"store_up": True, "chunks": 12, "stored_chunks": 3, "cached_tokens": 8},
    "considered": [
        {"decode": "decode-0", "prefill": "prefill-0", "predicted_ms": 28.0, "cached_tokens": 8}
        | PLACEMENT,
        {"decode": "decode-11", "prefill": None, "predicted_ms": 99.0, "cached_tokens": 0}
        | PLACEMENT,
    ],
    "predicted_ms": 28.0,
    "expected_ms": 23.0,
    "first_token_ms": 20.0,
    "decoding_ms": 30.5,
    "error_ms": 7.5,
    "fetch_or_compute": {
        "did": "fetched",
        "fetched_tokens": 48,
        "declined_tokens": 16,
        "fetch_predicted_ms": 8.0,
        "compute_predicted_ms": 30.0,
        "fetch_ms": 9.0,
    },
    "measured": [
        {
            "node": "prefill-0",
            "handoff_ms": 0.0,
            "queue_ms": 1.5,
            "fetch_ms": 9.0,
            "prefill_ms": 8.0,
            "cached_tokens": 8,
            "host_tokens": 0,
            "fetched_tokens": 48,
            "computed_tokens": 9,
        },
        {
            "node": "decode-0",
            "handoff_ms": 18.5,
            "queue_ms": 0.5,
            "fetch_ms": 6.0,
            "prefill_ms": 2.0,
            "cached_tokens": 0,
            "host_tokens": 0,
            "fetched_tokens": 592,
            "computed_tokens": 8,
        },
    ],
    "prefill_given_up_at_ms": None,
    "ended": {"why": "link", "at_ms": 40.0, "node": "decode-0"},
}
EXPLANATION: dict[str, Any] = {
    "id": "ab" * 16,
    "client_request_id": "mine-7",
    "endpoint": "chat",
    "tenant": "acme",
    "model": "demo",
    "came": 0.0,
    "state": "ended",
    "status": 200,
    "error": None,
    "held": None,
    "prepared_ms": 1.0,
    "first_token_ms": 21.25,
    "total_ms": 500.0,
    "prompt_tokens": 600,
    "cached_tokens": 56,
    "completion_tokens": 20,
    "exact": "numeric",
    "requests": [
        {
            "id": "ab" * 16,
            "state": "done",
            "drafts": {"drafted": 16, "accepted": 12, "forced": 5},
            "waits": [{"at_ms": 40.0, "ms": 3.0, "why": "no node is ready"}],
            "attempts": [ATTEMPT],
            "attempts_left_out": 0,
        }
    ],
    "requests_left_out": 0,
}


def options(**flags: Any) -> ExplainOptions:
    return ExplainOptions(**({"id": EXPLANATION["id"]} | flags))


def test_the_text_lists_the_candidates_and_compares_prediction_with_measurement() -> None:
    assert list(lines_of(EXPLANATION)) == [
        f"{EXPLANATION['id']}: chat, demo, tenant acme",
        "  client request id 'mine-7'",
        "  came 1970-01-01 00:00:00 UTC, first token after 21.2 ms, status 200 after 500.0 ms",
        "  600 prompt tokens (56 cached), 20 completion tokens",
        "  exact: numeric",
        "  ready to be placed after 1.0 ms",
        "  at 1.2 ms: attempt 1: prefill prefill-0, decode decode-0 (split)",
        "    uncached 9 of 600 tokens, 28.0 ms; decode node alone 99.0 ms",
        "    known: store up, it holds 3 of 12 chunks",
        "       DECODE     PREFILL    PREDICTED  QUEUE  COMPUTE  FETCH  SLOWDOWN    CACHED",
        "    *  decode-0   prefill-0       28.0    1.0     20.0    2.0       5.0  8 tokens",
        "       decode-11  -               99.0    1.0     20.0    2.0       5.0  0 tokens",
        "    predicted 28.0 ms, of which 23.0 ms until decode-0 decodes; measured 30.5 ms, +7.5 ms",
        "    client's first token after 20.0 ms",
        "    fetch or compute: fetched; predicted: fetch 8.0 ms, compute 30.0 ms;"
        " 48 tokens fetched in 9.0 ms, 16 left",
        "    prefill-0: queue 1.5 ms, fetch 9.0 ms, prefill 8.0 ms; 8 tokens cached,"
        " 0 from its host tier, 48 fetched, 9 computed",
        "    decode-0: waited for the prefill node 18.5 ms, queue 0.5 ms, fetch 6.0 ms,"
        " prefill 2.0 ms; 0 tokens cached, 0 from its host tier, 592 fetched, 8 computed",
        "    at 40.0 ms: ended: link (decode-0)",
        "  at 40.0 ms: waited 3.0 ms: no node is ready",
        "  12 of 16 drafts right, of which a grammar forced 5",
    ]


def test_each_of_several_prompts_is_listed_under_its_own_id() -> None:
    both = [EXPLANATION["requests"][0] | {"id": f"{EXPLANATION['id']}-{slot}"} for slot in (0, 1)]
    lines = list(lines_of(EXPLANATION | {"requests": both, "requests_left_out": 3}))
    assert f"{EXPLANATION['id']}-1: done" in lines
    assert lines[-1] == "and 3 more prompts"


@pytest.mark.integration
async def test_explain_prints_a_router_s_explanation_of_a_request(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("acme the-key\n")
    async with FakeNode("decode-0", "decode") as node:
        settings = RouterSettings(port=0, nodes=(node.address,), api_keys=str(tmp_path / "keys"))
        async with Router(settings) as router, aiohttp.ClientSession() as session:
            await until(lambda: len(list(router.view.ready())) == 1)
            url = f"http://127.0.0.1:{router.port}"
            body, headers = {"prompt": "Hello"}, {"Authorization": "Bearer the-key"}
            async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
                request_id = answer.headers["x-baton-request-id"]
            flags = {"id": request_id, "url": url, "api_key": "the-key"}
            assert await asyncio.to_thread(run, options(**flags)) == 0
            text = capsys.readouterr().out
            assert "attempt 1: decode decode-0 (no_prefill)" in text
            assert "measured" in text
            assert await asyncio.to_thread(run, options(**flags, json=True)) == 0
            assert json.loads(capsys.readouterr().out)["id"] == request_id
            with pytest.raises(CommandError, match=r"is unknown; .* \(HTTP 404\)"):
                await asyncio.to_thread(ask, options(**flags | {"id": "../pool"}))
            with pytest.raises(CommandError, match=r"unknown.* \(HTTP 401\)"):
                await asyncio.to_thread(ask, options(**flags | {"api_key": "other"}))


@pytest.mark.integration
@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("localhost:8000", "--url localhost:8000 is not a URL; write http://HOST:PORT"),
        ("http://127.0.0.1:x", "--url http://127.0.0.1:x: "),
        ("http://127.0.0.1:1", "no router answers at http://127.0.0.1:1: "),
    ],
)
def test_an_invalid_router_address_is_named_in_the_error(url: str, error: str) -> None:
    with pytest.raises(CommandError) as caught:
        ask(options(url=url))
    assert str(caught.value).startswith(error)


def test_an_answer_that_is_no_explanation_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton_cli.commands.explain.ask", lambda _: {"hello": 1})
    with pytest.raises(CommandError, match="did not answer with an explanation"):
        run(options())
