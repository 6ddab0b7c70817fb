"""The operator's client with a server that is silent, unreachable or answers with an error.

tests/cluster/test_operator_api.py tests it with a real API server.
"""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from baton_cli.commands.up import reserve_port
from baton_operator.kube.client import (
    Api,
    ApiError,
    ApiUnavailable,
    Conflict,
    Refused,
    ServerFailed,
    TooManyRequests,
)
from baton_operator.kube.connection import ConnectionFailed, load, login
from baton_operator.kube.kinds import ChildKey
from tests.support.kubernetes.api_server import api_server

pytestmark = pytest.mark.integration

SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "one", "namespace": "default"},
    "spec": {"ports": [{"port": 80}]},
}
KEY = ChildKey("v1", "Service", "default", "one")


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, ApiUnavailable),
        (403, Refused),
        (409, Conflict),
        (422, Refused),
        (429, TooManyRequests),
        (500, ServerFailed),
        (503, ServerFailed),
    ],
)
async def test_each_error_status_raises_its_error(status: int, error: type[ApiError]) -> None:
    counted: list[tuple[str, str]] = []
    async with api_server() as server:
        api = Api(Configuration(host=server.url), lambda *one: counted.append(one), 120.0)
        assert (await api.apply(SERVICE))["spec"] == SERVICE["spec"]
        server.refuses = lambda method, path: status
        with pytest.raises(ApiError) as caught:
            await api.apply(SERVICE)
        await api.close()
    assert type(caught.value) is error
    assert "not in this test" in str(caught.value)
    assert counted == [("apply", "201"), ("apply", str(status))]


def kubeconfig(folder: Path, port: int) -> Path:
    content = {
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "abc"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path = folder / "config"
    path.write_text(json.dumps(content))
    return path


async def test_an_unreachable_server_is_unavailable(tmp_path: Path) -> None:
    counted: list[tuple[str, str]] = []
    with reserve_port("127.0.0.1", 0) as held:
        config = await load({"KUBECONFIG": str(kubeconfig(tmp_path, held.getsockname()[1]))})
        api = Api(config, lambda *one: counted.append(one), 120.0)
        with pytest.raises(ApiUnavailable):
            await api.apply(SERVICE)
        await api.close()
    assert counted == [("apply", "error")]


async def test_a_silent_server_is_unavailable_after_the_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        config = await load({"KUBECONFIG": str(kubeconfig(tmp_path, silent.getsockname()[1]))})
        api = Api(config, lambda *one: None, 0.2)
        async with asyncio.timeout(60):
            with pytest.raises(ApiUnavailable, match=r"no answer within 0\.2 s"):
                await api.get(KEY)
        await api.close()


async def test_kopf_gets_the_same_login(tmp_path: Path) -> None:
    info = await login({"KUBECONFIG": str(kubeconfig(tmp_path, 1234))})
    assert (info.server, info.token) == ("http://127.0.0.1:1234", "abc")


async def test_the_error_for_a_missing_kubeconfig_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFailed, match="KUBECONFIG"):
        await load({"KUBECONFIG": str(tmp_path / "none")})
