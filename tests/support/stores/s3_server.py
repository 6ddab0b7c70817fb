"""An S3 server with one bucket, in this process; and the variables by which clients find it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.server import ThreadedMotoServer

BUCKET = "baton-files"


@contextmanager
def s3_server() -> Iterator[str]:
    """The URL of a server whose bucket is empty."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        make = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
        with urllib.request.urlopen(make, timeout=60):
            yield url
    finally:
        server.stop()


def use_server(patch: pytest.MonkeyPatch, url: str) -> None:
    """Let clients of this test use the server."""
    patch.setenv("AWS_ENDPOINT_URL", url)
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_ACCESS_KEY_ID", "key-of-the-tests")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-the-tests")
