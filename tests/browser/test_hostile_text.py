"""Text of others is text on the live page: names, prompts, answers and errors that look like HTML
or scripts are shown as they are, and nothing in them runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from playwright.sync_api import Page, Route, expect

from tests.support.browser.visits import PATIENCE_MS, Visit
from tests.support.pools.processes import Cluster

Open = Callable[..., Visit]

PAYLOADS = (
    "<img src=x onerror=window.ran=1>",
    "<script>window.ran=1</script>",
    '"><svg onload=window.ran=1>',
    "</title></textarea></style><iframe srcdoc='<script>parent.ran=1</script>'>",
    "javascript:window.ran=1",
    "{{constructor.constructor('window.ran=1')()}}",
    "\u202eevil\u0000\u001b[31m",
)
HOSTILE = " ".join(PAYLOADS)
LONG = HOSTILE * 40
TIME = 1_764_000_000_000

expect.set_options(timeout=PATIENCE_MS)


def hostile(text: str) -> dict[str, Any]:
    """A snapshot with `text` in every field that is a string."""
    request = {
        "id": text, "tenant": text, "endpoint": text, "prompt_tokens": 5, "cached_tokens": 2,
        "completion_tokens": 3, "prefill": text, "decode": text, "attempts": 1,
    }  # fmt: skip
    figures = {
        "running": 1, "waiting": 1, "free_blocks": 5, "cached_blocks": 3, "total_blocks": 10,
        "tokens_per_s": 3.0, "kv_in_bytes_per_s": 1e6, "kv_out_bytes_per_s": 1e6,
    }  # fmt: skip
    node = {"state": text, "reason": text, "asleep": False, "exact": text, **figures}
    rates = ("requests_per_s", "tokens_per_s", "prompt_tokens_per_s", "errors_per_s")
    latency = (
        *("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"),
        *("prediction_error_p50_ms", "cache_hit_rate"),
    )
    return {
        "at_ms": TIME,
        "pool": text,
        "router": text,
        "model": text,
        "viewer": {"tenant": text, "admin": True},
        "totals": {
            "running": 1, "waiting": 1, "ready_nodes": 1, "nodes": 2, **dict.fromkeys(rates, 1.0)
        },
        "latency": dict.fromkeys(latency, 0.5),
        "nodes": [
            {**node, "id": f"{number}{text}", "role": role}
            for number, role in enumerate(("prefill", "decode"))
        ],
        "flows": [{"source": f"0{text}", "target": f"1{text}", "requests": 1}],
        "requests": [{**request, "phase": text, "age_ms": 5.0}],
        "requests_left_out": 1,
        "ended": [
            {
                **request, "id": f"ended {text}", "status": 500, "error": text,
                "first_token_ms": None, "total_ms": 9.0,
            }
        ],
        "tenants": [{"name": text, "running": 1, "waiting": 0}],
        "decisions": [{"at_ms": TIME, "prefill": 1, "decode": 1, "reason": text}],
    }  # fmt: skip


def explanation(text: str) -> dict[str, Any]:
    """An explanation with `text` in every field that is a string."""
    option = {
        "decode": text, "prefill": text, "predicted_ms": 3.0, "queue_ms": 1.0, "compute_ms": 1.0,
        "fetch_ms": 1.0, "slowdown_ms": 0.0, "cached_tokens": 0, "uncached": 5,
    }  # fmt: skip
    stats = {
        "queue_ms": 1.0, "fetch_ms": 1.0, "prefill_ms": 1.0, "handoff_ms": 1.0,
        "cached_tokens": 1, "fetched_tokens": 1, "computed_tokens": 1,
    }  # fmt: skip
    attempt = {
        "attempt": 1, "at_ms": 0.0, "prefill": text, "decode": text, "reason": text,
        "explanation": text, "uncached_tokens": 5, "exact": text, "considered": [option],
        "known": {"store_up": True, "chunks": 1, "stored_chunks": 1, "cached_tokens": 0},
        "predicted_ms": 3.0, "expected_ms": 3.0, "first_token_ms": 2.0, "decoding_ms": 3.0,
        "error_ms": 0.0, "prefill_given_up_at_ms": 1.0,
        "fetch_or_compute": {"did": text, "fetched_tokens": 1, "fetch_ms": 1.0},
        "measured": [{"node": text, **stats}],
        "ended": {"why": "link", "at_ms": 5.0, "node": text},
    }  # fmt: skip
    request = {
        "id": text, "state": text, "prompt_tokens": 5, "cached_tokens": 0, "completion_tokens": 3,
        "waits": [{"at_ms": 0.0, "ms": 1.0, "why": text}],
        "attempts": [attempt, {**attempt, "attempt": 2}], "attempts_left_out": 1,
    }  # fmt: skip
    return {
        "id": text, "client_request_id": text, "endpoint": text, "tenant": text, "model": text,
        "came": TIME / 1000, "state": "ended", "status": 200, "error": text, "held": text,
        "prepared_ms": 1.0, "first_token_ms": 2.0, "total_ms": 9.0, "prompt_tokens": 5,
        "cached_tokens": 0, "completion_tokens": 3, "exact": text,
        "requests": [request, request], "requests_left_out": 1,
    }  # fmt: skip


def serve_hostile(page: Page, text: str) -> None:
    """Answer the page's requests with hostile records."""
    chunks: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": part, "reasoning": part}, "finish_reason": None}]}
        for part in PAYLOADS
    ]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    chat = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    named = text.encode("ascii", "ignore").decode().replace("\0", "").replace("\x1b", "")

    def stream(body: str) -> Callable[[Route], None]:
        headers = {
            "content-type": "text/event-stream",
            "x-baton-request-id": "hostile",
            "x-baton-placement": f"prefill={named.replace(' ', '')} decode=x reason=split: {named}",
        }
        return lambda route: route.fulfill(status=200, headers=headers, body=body)

    def answer(body: Any) -> Callable[[Route], None]:
        return lambda route: route.fulfill(status=200, json=body)

    page.route("**/pool/events", stream(f"event: snapshot\ndata: {json.dumps(hostile(text))}\n\n"))
    page.route("**/v1/chat/completions", stream(chat))
    page.route("**/requests/**", answer(explanation(text)))
    page.route(
        re.compile(r"/pool$"),
        answer({"store": {"configured": True, "reachable": True, "instances": []}}),
    )


def nothing_ran(page: Page) -> None:
    assert page.evaluate("window.ran") is None
    foreign = (
        "document.querySelectorAll('img[src=x], iframe, script:not([src]), [onload], [onerror]')"
    )
    assert page.evaluate(f"{foreign}.length") == 0
    assert page.evaluate("document.querySelectorAll('a[href^=javascript]').length") == 0


def test_records_that_look_like_html_are_shown_as_text(pool: Cluster, visit: Open) -> None:
    seen = visit(pool.url, go=False)
    page = seen.page
    serve_hostile(page, HOSTILE)
    page.goto(pool.url + "/")
    expect(page.locator("#title")).to_contain_text(PAYLOADS[0])
    expect(page.locator("#running tbody tr")).to_contain_text(PAYLOADS[1])
    expect(page.locator("#planner tbody")).to_contain_text(PAYLOADS[2])
    expect(page.locator("#ended tbody")).to_contain_text(PAYLOADS[0])
    page.get_by_text("Nodes as a table").click()
    expect(page.locator("#nodes tbody")).to_contain_text(PAYLOADS[3])
    page.locator("#ended tbody button").click()
    expect(page.locator("#explanation section.attempt").first).to_contain_text(PAYLOADS[0])
    nothing_ran(page)
    assert not seen.is_scrolled_sideways()


def test_prompts_and_answers_that_look_like_html_are_shown_as_text(
    pool: Cluster, visit: Open
) -> None:
    page = visit(pool.url, go=False).page
    serve_hostile(page, HOSTILE)
    page.goto(pool.url + "/")
    prompt = " ".join(PAYLOADS[:6])
    page.locator("#question").fill(prompt)
    page.keyboard.press("Enter")
    expect(page.locator(".message.user .text")).to_have_text(prompt)
    expect(page.locator(".answer > .text").last).to_contain_text(PAYLOADS[3])
    expect(page.locator(".takeover").first).to_contain_text(PAYLOADS[0])
    page.get_by_text("Why there?").click()
    nothing_ran(page)


def test_an_endless_name_does_not_widen_the_page(pool: Cluster, visit: Open) -> None:
    seen = visit(pool.url, go=False)
    serve_hostile(seen.page, "x" * 4000 + LONG)
    seen.page.goto(pool.url + "/")
    expect(seen.page.locator("#title")).to_contain_text("xxx")
    seen.page.locator("#ended tbody button").click()
    expect(seen.page.locator("#explanation section.attempt").first).to_be_attached()
    assert not seen.is_scrolled_sideways()


def test_the_router_s_error_message_is_shown_as_text(pool: Cluster, visit: Open) -> None:
    seen = visit(pool.url, go=False)
    page = seen.page
    refuse = {"error": {"message": HOSTILE}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=503, json=refuse))
    page.goto(pool.url + "/")
    page.locator("#question").fill("Hello")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .problem")).to_contain_text(PAYLOADS[0])
    nothing_ran(page)
    seen.problems[:] = [text for text in seen.problems if "503" not in text]
