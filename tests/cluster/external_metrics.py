"""A server of external metrics with values set by a test, for a real HorizontalPodAutoscaler.

In: a cluster. Out: an ExternalMetrics whose `value` becomes the value of every external metric.
It is an HTTPS server in this process; the API server reaches it through an APIService, a Service
without a selector, and an EndpointSlice with this machine's address.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.cluster.machine.client import Kubernetes
from tests.support.clients.http import Json
from tests.support.wires.tls import make_certificate

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
NAME = "external-metrics"
CALL_S = 60.0


class ExternalMetrics:
    """The metrics' common value, an integer. `requests` counts the reads of metrics."""

    def __init__(self) -> None:
        self.value = 0
        self.requests = 0

    def answer(self, path: str) -> Json | None:
        """The answer to ROOT or ROOT/namespaces/NAMESPACE/METRIC; None for any other path."""
        if path == ROOT:
            return _resources()
        if not path.startswith(f"{ROOT}/namespaces/"):
            return None
        self.requests += 1
        item = {
            "metricName": path.rsplit("/", 1)[1],
            "metricLabels": {},
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "value": str(self.value),
        }
        return {
            "kind": "ExternalMetricValueList",
            "apiVersion": f"{GROUP}/{VERSION}",
            "metadata": {},
            "items": [item],
        }


@contextmanager
def external_metrics(
    cluster: Kubernetes, namespace: str, folder: Path
) -> Iterator[ExternalMetrics]:
    """Serve external metrics. The Service lies in `namespace`; a cluster has one such server."""
    metrics = ExternalMetrics()
    with _serving(metrics, cluster.host_address, make_certificate(folder)) as port:
        objects = _objects(namespace, cluster.host_address, port)
        text = json.dumps({"kind": "List", "apiVersion": "v1", "items": objects})
        try:
            cluster.kubectl("apply", "-f", "-", stdin=text)
            flags = ("--for=condition=Available", "--timeout=180s")
            cluster.kubectl("wait", f"apiservice/{VERSION}.{GROUP}", *flags)
            yield metrics
        finally:
            cluster.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=text)


@contextmanager
def _serving(metrics: ExternalMetrics, address: str, certificate: Path) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CALL_S

        def do_GET(self) -> None:
            body = metrics.answer(urlsplit(self.path).path)
            data = json.dumps(body).encode()
            self.send_response(200 if body is not None else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with ThreadingHTTPServer((address, 0), Handler) as server:
        # Do each TLS handshake in the connection's thread, not in the accepting one.
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def _resources() -> Json:
    return {"kind": "APIResourceList", "groupVersion": f"{GROUP}/{VERSION}", "resources": []}


def _objects(namespace: str, address: str, port: int) -> list[Json]:
    metadata = {"name": NAME, "namespace": namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {"ports": [{"port": 443, "targetPort": port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": NAME}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
            "ports": [{"port": port, "protocol": "TCP", "name": ""}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": {**metadata, "port": 443},
            },
        },
    ]
