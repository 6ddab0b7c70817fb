"""The spans of one request through a real pool, received by an OpenTelemetry collector."""

from __future__ import annotations

from tests.support.clients.http import exchange
from tests.support.pools.baton_up import Pool
from tests.support.pools.collector import Collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "nobody may read this"
SIM = ("--engine", "sim", "--chunk-blocks", "1", "--handoff", "always")


def test_a_request_is_one_trace_with_spans_of_router_prefill_and_decode_node() -> None:
    with Collector() as collector, Pool([*SIM, "--otlp-endpoint", collector.url]) as pool:
        body = {"prompt": SECRET * 10, "max_tokens": 4, "temperature": 0}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        response = exchange(pool.url, "/v1/completions", body, headers)
        assert response.status == 200
        # Each process sends its remaining spans before it ends.
    (call,) = collector.named("completions")
    (placement,) = collector.named("placement")
    (prefill,) = collector.named("prefill")
    (decode,) = collector.named("decode")
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert call.parent_id == PARENT
    assert {span.parent_id for span in (placement, prefill, decode)} == {call.span_id}
    assert len({span.span_id for span in collector.spans}) == 4
    services = [span.service for span in (call, placement, prefill, decode)]
    assert services == ["baton-router", "baton-router", "baton-node", "baton-node"]
    assert (prefill.instance, decode.instance) == ("prefill-0", "decode-0")
    for span in (call, prefill, decode):
        assert span.attributes["baton.request"] == response.headers["x-baton-request-id"]
    for span in (prefill, decode):
        assert {"baton.queue_ms", "baton.fetch_ms", "baton.prefill_ms"} <= span.attributes.keys()
        assert call.start_ns <= span.start_ns <= span.end_ns
    assert call.attributes["gen_ai.usage.output_tokens"] == 4
    assert call.attributes["baton.placement.reason"] == "always"
    assert SECRET not in str(collector.spans)
