"""Export of spans to a collector: when spans are sent, with which ids, and when not."""

from __future__ import annotations

import sys
import time

import pytest

from baton_cli.errors import CommandError
from baton_cli.otlp import export_spans
from baton_protocol.traces import Place, Span
from tests.support.pools.collector import Collector

TRACE, PARENT, OWN = "ab" * 16, "cd" * 8, "ef" * 8
SERVER, INTERNAL = 2, 1


def span(parent: str = PARENT, **changes: object) -> Span:
    facts: dict[str, object] = {
        "served": True,
        "attributes": {"baton.attempt": 2, "baton.node": "d"},
    }
    return Span("decode", Place(TRACE, OWN, parent), 10**18, 10**18 + 5, **(facts | changes))  # type: ignore[arg-type]


@pytest.mark.integration
@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_a_span_arrives_with_its_own_ids_and_times(path: str) -> None:
    with (
        Collector() as collector,
        export_spans(collector.url + path, {}, "baton-node", "decode-0") as send,
    ):
        assert send is not None
        send(span())
        send(span(parent="", served=False, error="engine_error"))
    seen, root = collector.spans
    assert (seen.service, seen.instance, seen.name) == ("baton-node", "decode-0", "decode")
    assert (seen.trace_id, seen.span_id, seen.parent_id) == (TRACE, OWN, PARENT)
    assert (seen.start_ns, seen.end_ns, seen.kind) == (10**18, 10**18 + 5, SERVER)
    assert seen.attributes == {"baton.attempt": 2, "baton.node": "d"}
    assert (root.trace_id, root.span_id, root.parent_id) == (TRACE, OWN, "")
    assert (root.failed, root.kind) == (True, INTERNAL)
    assert root.attributes["error.type"] == "engine_error"


@pytest.mark.integration
def test_the_standard_otel_variables_name_the_collector_and_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Collector() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_SERVICE_NAME": "my-llm",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with export_spans("", variables, "baton-node", "decode-0") as send:
            assert send is not None
            send(span())
    assert [seen.service for seen in collector.spans] == ["my-llm"]


def test_no_span_is_sent_without_an_endpoint_or_with_the_sdk_disabled() -> None:
    with export_spans("", {}, "baton-node", "n") as send:
        assert send is None
    with export_spans("http://127.0.0.1:1", {"OTEL_SDK_DISABLED": "true"}, "s", "n") as send:
        assert send is None


@pytest.mark.integration
def test_an_unreachable_collector_does_not_delay_the_process() -> None:
    with export_spans("http://127.0.0.1:1", {}, "baton-node", "n") as send:
        assert send is not None
        began = time.monotonic()
        send(span())
    assert time.monotonic() - began < 30


def test_an_endpoint_that_is_no_url_is_named_in_the_error() -> None:
    with pytest.raises(CommandError, match="--otlp-endpoint collector:4318 is not a URL"):
        export_spans("collector:4318", {}, "baton-node", "n").__enter__()


def test_a_missing_library_is_an_error_that_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(CommandError, match=r"pip install '\.\[otel\]'"):
        export_spans("http://127.0.0.1:1", {}, "baton-node", "n").__enter__()


def test_without_the_library_otel_variables_only_cause_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    with export_spans("", variables, "baton-node", "n") as send:
        assert send is None
    assert "pip install '.[otel]'" in caplog.text


def test_a_span_that_cannot_be_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with export_spans("http://127.0.0.1:1", {}, "baton-node", "n") as send:
        assert send is not None
        send(Span("decode", Place("no hex", "either"), 1, 2))
    assert "sending a span failed" in caplog.messages
