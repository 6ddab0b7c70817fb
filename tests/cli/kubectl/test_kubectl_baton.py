"""`kubectl baton`: its commands with real routers, and a program in place of kubectl.

That program answers `get` from files, and `port-forward` with the port of a router. With the real
kubectl and a real API server: tests/cluster/test_node_pools.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from baton_cli.kubectl.main import COMMANDS, main
from baton_protocol.link import DrainNode, ResumeNode
from baton_router.server.router import Router
from baton_router.settings import RouterSettings
from tests.support.nodes.fake_node import FakeNode
from tests.support.waiting import until

TOKEN = "the-link-token"
KUBECTL = """#!/bin/sh
cd {folder}
echo "$*" >> calls
case "$*" in
    *port-forward*)
        for pod in first second; do
            case "$*" in
                *pod/$pod*)
                    echo $$ > forward
                    echo "Forwarding from 127.0.0.1:$(cat $pod) -> 8000"
                    exec sleep 600;;
            esac
        done
        echo 'error: unable to forward port because pod is not running' >&2; exit 1;;
    *"get pods"*) file=pods.json;;
    *"get secret"*) file=secret.json;;
    *) file=pool.json;;
esac
cat $file 2>/dev/null || {{ echo 'Error from server (NotFound): no such object' >&2; exit 1; }}
"""


class Stage:
    """The files that the program in place of kubectl answers from, and two routers."""

    def __init__(self, folder: Path, node: FakeNode, urls: list[str]) -> None:
        self.folder = folder
        self.node = node
        self.urls = urls
        for name, url in zip(("first", "second"), urls, strict=True):
            (folder / name).write_text(url.rpartition(":")[2])
        self.put("secret", {"data": {"link-token": base64.b64encode(TOKEN.encode()).decode()}})
        self.put_pods("second", "first")

    def put(self, name: str, body: dict[str, Any]) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(body))

    def put_pods(self, *pods: str, phase: str = "Running") -> None:
        """The first one is not ready."""
        items = [
            {
                "metadata": {"name": name},
                "status": {
                    "phase": phase,
                    "conditions": [{"type": "Ready", "status": str(name != pods[0])}],
                },
            }
            for name in pods
        ]
        self.put("pods", {"items": items})

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    async def run(self, *words: str) -> int:
        return await asyncio.to_thread(main, words)


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Routers whose link token opens routes that change nodes."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    async with FakeNode("decode-0", "decode") as node:
        settings = RouterSettings(port=0, nodes=(node.address,), link_token=TOKEN)
        async with Router(settings) as first, Router(settings) as second:
            routers = (first, second)
            await until(lambda: all(len(list(router.view.ready())) == 1 for router in routers))
            urls = [f"http://127.0.0.1:{router.port}" for router in routers]
            yield Stage(tmp_path, node, urls)


@pytest.mark.integration
async def test_explain_asks_each_router_until_one_knows_the_request(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stage.urls[1]}/v1/completions", json={"prompt": "Hello"}) as answer,
    ):
        request_id = answer.headers["x-baton-request-id"]
    assert await stage.run("explain", "demo", request_id, "-n", "models", "--context", "c") == 0
    assert "attempt 1: decode decode-0" in capsys.readouterr().out
    given = "--namespace=models --context=c"
    labels = "baton.dev/pool=demo,baton.dev/component=router"
    assert stage.calls() == [
        f"{given} get secret demo-auth --output=json",
        f"{given} get pods --selector={labels} --output=json",
        f"{given} port-forward --address=127.0.0.1 pod/first :8000",
        f"{given} port-forward --address=127.0.0.1 pod/second :8000",
    ]
    assert await stage.run("explain", "demo", "0" * 32) == 1
    assert "is unknown" in capsys.readouterr().err


@pytest.mark.integration
async def test_drain_and_resume_use_the_pool_s_link_token(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await stage.run("drain", "demo", "decode-0", "--deadline", "7") == 0
    assert "decode-0 drains" in capsys.readouterr().out
    assert await stage.run("resume", "demo", "decode-0") == 0
    frames = [frame for frame in stage.node.got if isinstance(frame, DrainNode | ResumeNode)]
    assert [type(frame) for frame in frames] == [DrainNode, ResumeNode]
    assert frames[0] == DrainNode(7.0, "kubectl baton drain", "")
    assert TOKEN not in "".join(stage.calls())


@pytest.mark.integration
async def test_top_shows_the_pool_s_nodes(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert await stage.run("top", "demo", "--once") == 0
    assert "decode-0  decode  ready" in capsys.readouterr().out


@pytest.mark.integration
async def test_a_plugin_that_is_ended_leaves_no_port_forward_behind(stage: Stage) -> None:
    words = ("-m", "baton_cli.kubectl", "top", "demo", "--json")
    plugin = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert plugin.stdout is not None
        async with asyncio.timeout(120.0):
            assert b"decode-0" in await plugin.stdout.readline()
            plugin.terminate()
            assert await plugin.wait() == 128 + signal.SIGTERM
    finally:
        if plugin.returncode is None:
            plugin.kill()
            await plugin.wait()
    assert not psutil.pid_exists(int((stage.folder / "forward").read_text()))


@pytest.mark.integration
async def test_without_the_right_to_read_the_token_an_error_says_which_right_is_missing(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    (stage.folder / "secret.json").unlink()
    assert await stage.run("drain", "demo", "decode-0") == 1
    error = capsys.readouterr().err
    assert "this route needs the pool's link token" in error
    assert "set BATON_API_KEY to a key of the pool" in error
    assert "or get the right to read Secret demo-auth" in error


@pytest.mark.integration
async def test_why_explains_the_pool_s_conditions(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.put("pool", {"metadata": {"name": "demo", "namespace": "models"}})
    assert await stage.run("why", "demo") == 0
    assert "no operator has looked at it yet" in capsys.readouterr().out
    assert stage.calls() == ["get inferencepools.baton.dev demo --output=json"]


@pytest.mark.integration
async def test_an_error_is_one_line_with_kubectl_s_message(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def error(*words: str) -> str:
        assert await stage.run(*words) == 1
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert await error("why", "demo") == (
        "kubectl baton: Error from server (NotFound): no such object"
    )
    stage.put_pods("third")
    assert await error("top", "demo", "--once") == (
        "kubectl baton: no port forward to the router: error: unable to forward port because pod is"
        " not running"
    )
    stage.put_pods("first", phase="Pending")
    assert "no router of pool demo runs here; `kubectl baton why demo` says why" in await error(
        "resume", "demo", "decode-0"
    )
    monkeypatch.setenv("PATH", "")
    assert "kubectl is not on the PATH: install it" in await error("why", "demo")


def test_help_lists_each_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["--help"])
    assert ending.value.code == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"kubectl baton {name} " not in text] == []


@pytest.mark.parametrize("words", [[], ["dance"], ["drain", "demo"], ["why", "demo", "--once"]])
def test_a_wrong_command_line_exits_with_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ending:
        main(words)
    assert ending.value.code == 2
    assert "kubectl baton" in capsys.readouterr().err
