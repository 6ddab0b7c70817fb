"""An OpenTelemetry collector for spans only: receives, decodes and keeps OTLP over HTTP.

In: POST /v1/traces from real exporters. Out: the spans, each with its sender's service name and
instance.
"""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TRACES = "/v1/traces"


@dataclass(frozen=True)
class Seen:
    """One received span. Ids are in hex digits, times in Unix nanoseconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    failed: bool
    attributes: dict[str, Any]


class Collector:
    """`with Collector() as collector`: listens at `url`; `spans` holds all received spans."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]

    def _take(self, body: bytes) -> None:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_seen(about, span) for span in scope.spans]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                known = self.path == TRACES
                if known:
                    packed = self.headers.get("Content-Encoding") == "gzip"
                    take(gzip.decompress(body) if packed else body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler


def _seen(about: dict[str, Any], span: Any) -> Seen:
    return Seen(
        service=about.get("service.name", ""),
        instance=about.get("service.instance.id", ""),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        failed=span.status.code == 2,  # STATUS_CODE_ERROR
        attributes=_values(span.attributes),
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
