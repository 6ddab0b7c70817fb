"""Sends spans to an OpenTelemetry collector over OTLP/HTTP, with OpenTelemetry's own library.

In: the flag --otlp-endpoint or OpenTelemetry's variables; finished spans. Out: OTLP requests, which
the library sends in its own thread. Spans arrive with their trace and span ids, and the library
uses these ids. An unreachable collector costs a log line and its spans, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from baton_cli.errors import CommandError
from baton_protocol.traces import Place, Sink, Span

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.id_generator import IdGenerator

logger = logging.getLogger(__name__)
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
DISABLED = "OTEL_SDK_DISABLED"
SERVICE_NAME = "OTEL_SERVICE_NAME"
TRACES_PATH = "/v1/traces"
# Limit for one export with its retries. It also bounds the delay at exit while the collector is
# unreachable.
TIMEOUT_S = 2.0


@contextmanager
def export_spans(
    endpoint: str, environ: Mapping[str, str], service: str, instance: str
) -> Iterator[Sink | None]:
    """Yield the sink for this process's spans, or None if no flag or variable names a collector.
    Leaving the context flushes pending spans. Raise CommandError if --otlp-endpoint is no URL or
    the library is missing."""
    wanted = endpoint or any(environ.get(name) for name in ENDPOINTS)
    if not wanted or environ.get(DISABLED, "").lower() == "true":
        yield None
        return
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise CommandError(
            f"--otlp-endpoint {endpoint} is not a URL; write the collector's URL, such "
            "as http://host:4318"
        )
    try:
        exporter = _Exporter(endpoint, service if SERVICE_NAME not in environ else "", instance)
    except ImportError as error:
        problem = (
            f"cannot send spans: {error.name} is missing; pip install '.[otel]' in the checkout"
        )
        if endpoint:
            raise CommandError(f"--otlp-endpoint {endpoint}: {problem}") from error
        logger.warning("%s", problem)  # no error: the variables may be meant for other programs
        yield None
        return
    try:
        yield exporter.send
    finally:
        exporter.close()


class _Exporter:
    """An empty `endpoint` or `service` leaves that value to OpenTelemetry's variables."""

    def __init__(self, endpoint: str, service: str, instance: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased

        about = {"service.instance.id": instance}
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource.create(about | ({"service.name": service} if service else {})),
            id_generator=self._ids.generator(),
            shutdown_on_exit=False,
        )
        url = endpoint.rstrip("/").removesuffix(TRACES_PATH) + TRACES_PATH if endpoint else None
        exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("baton")

    def send(self, span: Span) -> None:
        """Send one span. Call it from one thread only. Errors are logged, never raised: a span
        must not fail its request."""
        try:
            self._send(span)
        except Exception:
            logger.exception("sending a span failed")

    def _send(self, span: Span) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._ids.place = span.place
        sent = self._tracer.start_span(
            span.name,
            context=_above(span.place),
            kind=SpanKind.SERVER if span.served else SpanKind.INTERNAL,
            attributes=dict(span.attributes),
            start_time=span.start_ns,
        )
        if span.error:
            sent.set_attribute("error.type", span.error)
            sent.set_status(Status(StatusCode.ERROR))
        sent.end(span.end_ns)

    def close(self) -> None:
        self._provider.shutdown()


class _Ids:
    """Makes the library use the ids of `place`, the span that send() is about to start."""

    def __init__(self) -> None:
        self.place = Place("", "")

    def generator(self) -> IdGenerator:
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        ids = self

        class Given(IdGenerator):
            def generate_span_id(self) -> int:
                return int(ids.place.span_id, 16)

            def generate_trace_id(self) -> int:
                return int(ids.place.trace_id, 16)

        return Given()


def _above(place: Place) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    if not place.parent_id:
        return Context()
    parent = SpanContext(
        int(place.trace_id, 16),
        int(place.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())
