"""The router's spans: calls, placements, the trace context of jobs, and that no text leaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton_protocol.link import PrefillJob, RunJob
from baton_protocol.traces import Span
from baton_router.settings import RouterSettings
from tests.router import pools
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

pytestmark = pytest.mark.integration

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "nobody may read this"
BODY = {"prompt": SECRET, "max_tokens": 3, "user": SECRET}


@asynccontextmanager
async def traced(
    spans: list[Span], *nodes: FakeNode, **settings: Any
) -> AsyncIterator[pools.Client]:
    router_settings = RouterSettings(
        port=0, nodes=tuple(node.address for node in nodes), **settings
    )
    async with pools.connected(router_settings, spans=spans.append) as client:
        await client.ready(len(nodes))
        yield client


async def test_a_call_is_a_child_span_of_the_client_s_and_its_placement_a_child_of_the_call(
    decode: FakeNode, prefill: FakeNode
) -> None:
    spans: list[Span] = []
    async with traced(spans, decode, prefill, handoff="always") as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        _, body, answer = await client.post("/v1/completions", BODY, headers)
        await until(lambda: len(spans) == 2)
    call, placement = spans
    assert (call.name, call.served, call.error) == ("completions", True, "")
    assert (call.place.trace_id, call.place.parent_id) == (TRACE, PARENT)
    assert (placement.name, placement.served) == ("placement", False)
    assert (placement.place.trace_id, placement.place.parent_id) == (TRACE, call.place.span_id)
    assert call.start_ns <= placement.start_ns <= placement.end_ns <= call.end_ns
    assert call.attributes["baton.request"] == answer["x-baton-request-id"]
    assert call.attributes["gen_ai.usage.output_tokens"] == body["usage"]["completion_tokens"] == 3
    assert call.attributes["baton.placement.reason"] == "always"
    assert placement.attributes["baton.placement.prefill"] == "prefill-0"
    for job in (*decode.got_of(RunJob), *prefill.got_of(PrefillJob)):
        assert job.request.traceparent == f"00-{TRACE}-{call.place.span_id}-01"
    assert SECRET not in str(spans)


async def test_a_refused_call_s_span_has_the_error_code(decode: FakeNode) -> None:
    spans: list[Span] = []
    async with traced(spans, decode) as client:
        await client.post("/v1/completions", BODY | {"top_p": 7})
        await client.get("/health")
    (call,) = spans
    assert (call.error, call.attributes["http.response.status_code"]) == ("invalid_value", 400)
    assert call.place.parent_id == ""
    assert SECRET not in str(spans)


async def test_an_unsampled_traceparent_creates_no_spans(decode: FakeNode) -> None:
    spans: list[Span] = []
    async with traced(spans, decode) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        await client.post("/v1/completions", BODY, headers)
    assert spans == []
    assert [job.request.traceparent for job in decode.got_of(RunJob)] == [""]


async def test_a_router_without_a_span_sink_sends_no_trace_context(decode: FakeNode) -> None:
    async with pools.running(decode) as client:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        await client.post("/v1/completions", BODY, headers)
    assert [job.request.traceparent for job in decode.got_of(RunJob)] == [""]
