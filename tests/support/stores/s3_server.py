"""A real S3 server, SeaweedFS, with one bucket; and the variables by which clients find it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

SERVER = Path(sys.executable).with_name("weed")
BUCKET = "baton-files"
KEY, SECRET = "key-of-the-tests", "secret-of-the-tests"
START_S = 120.0
PORTS = ("master", "volume", "filer", "s3")  # each with a second one, for gRPC


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The URL of a server that keeps its data in this folder."""
    login = {"accessKey": KEY, "secretKey": SECRET}
    rights = ["Admin", "Read", "List", "Write"]
    config = folder / "s3.json"
    config.write_text(
        json.dumps({"identities": [{"name": "test", "credentials": [login], "actions": rights}]})
    )
    ports = dict(zip([f"{p}.port{q}" for p in PORTS for q in ("", ".grpc")], _free(8), strict=True))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                *(SERVER, "-logtostderr=true", "server", f"-dir={folder}", "-s3"),
                *(f"-{name}={port}" for name, port in ports.items()),
                *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={config}"),
                *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
                *("-volume.max=20", "-master.volumeSizeLimitMB=64", "-s3.autoCreateBucket"),
            ],
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{ports['s3.port']}"
    try:
        _await(f"{url}/healthz", folder / "log")
        _make_bucket(url)
        yield url
    finally:
        process.kill()
        process.wait()


def use_server(patch: pytest.MonkeyPatch, url: str, secret: str = SECRET) -> None:
    """Let clients of this test use the server."""
    patch.setenv("AWS_ENDPOINT_URL", url)
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_ACCESS_KEY_ID", KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def _make_bucket(url: str) -> None:
    """The server makes a bucket with the first object in it, once it has a volume for them."""
    store = S3Store(
        BUCKET,
        config={"endpoint": url, "access_key_id": KEY, "secret_access_key": SECRET},
        client_options={"allow_http": True},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=5)},
    )
    deadline = time.monotonic() + START_S
    while True:
        try:
            obstore.put(store, "first", b"1")
            return
        except BaseError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def _free(count: int) -> list[int]:
    """Ports that nothing listens on."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _await(url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.1)
