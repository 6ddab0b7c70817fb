"""One role per process, as in pods: configured by variables, stopped by SIGTERM."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from baton_cli.commands.role_settings import node_settings
from baton_cli.errors import CommandError
from baton_cli.options.records import NodeOptions
from baton_protocol.link import JobFailed, RunJob, to_node_codec, to_router_codec
from baton_protocol.store import ROLES
from tests.support.nodes.processes import make_request
from tests.support.pools.one_role import WAIT_S, role, wait_ready
from tests.support.project.command import baton, baton_process

pytestmark = pytest.mark.integration

WRONG_FLAG = 2


def complete(url: str) -> dict[str, object]:
    body = json.dumps({"prompt": "Hello", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        answer: dict[str, object] = json.load(response)
        return answer


def test_a_router_serves_a_node_from_its_nodes_flag_without_a_store() -> None:
    with (
        role("decode", BATON_ENGINE="sim", BATON_NODE="solo", BATON_SERVED_MODEL_NAME="m") as node,
        role("router", "--port", "0", BATON_NODES=node) as router,
    ):
        wait_ready(router)
        answer = complete(router)
        assert answer["model"] == "m"
        with urllib.request.urlopen(f"{router}/pool", timeout=WAIT_S) as response:
            assert [one["id"] for one in json.load(response)["nodes"]] == ["solo"]


def test_a_lone_prefill_node_serves_whole_requests() -> None:
    with (
        role("prefill", "--engine", "sim") as node,
        role("router", "--port", "0", "--nodes", node) as router,
    ):
        wait_ready(router)
        assert complete(router)["model"] == "sim"


async def test_json_logs_of_a_node_and_its_engine_name_request_and_attempt() -> None:
    log: list[str] = []
    with role("decode", "--engine", "sim", "--json-logs", log=log) as node:
        job = RunJob(make_request("r1", b"", attempt=3))  # every engine refuses an empty prompt
        codec = to_router_codec()
        async with (
            asyncio.timeout(WAIT_S),
            aiohttp.ClientSession() as session,
            session.ws_connect(f"{node}/link") as socket,
        ):
            await socket.send_bytes(to_node_codec().encode(job))
            while not isinstance(codec.decode(await socket.receive_bytes()), JobFailed):
                pass
    records = [json.loads(line) for line in log]
    [failed] = [record for record in records if "failed" in record["message"]]
    assert (failed["request"], failed["attempt"]) == ("r1", 3)
    assert {"baton_node.server.app", "baton_node.engine.main"} <= {one["logger"] for one in records}


@pytest.mark.parametrize("token", ["", "t0ken"])
def test_a_public_node_without_a_link_token_logs_a_warning(token: str) -> None:
    log: list[str] = []
    flags = ("--engine", "sim", "--host", "0.0.0.0", "--address", "http://127.0.0.1:1")
    with role("decode", *flags, log=log, BATON_LINK_TOKEN=token):
        pass
    warnings = [line for line in log if "WARNING" in line.upper() and "--link-token" in line]
    assert len(warnings) == (0 if token else 1)


def test_a_router_without_nodes_is_refused_in_one_line() -> None:
    done = baton_process("router", "--port", "0")
    assert done.returncode == WRONG_FLAG
    [line] = done.stderr.splitlines()
    assert line.startswith("baton: the router knows no nodes")


@pytest.mark.parametrize(
    ("command", "flags", "named"),
    [
        ("decode", ("--engine", "torch", "--model", "/no/such/model"), "--model /no/such/model"),
        ("prefill", ("--engine", "sim", "--model", "/no/such/model"), "--model /no/such/model"),
        ("decode", ("--engine", "sim", "--kv-memory", "1KiB"), "--kv-memory is 1024 bytes"),
        ("decode", ("--engine", "sim", "--chat-template", "/no/file"), "--chat-template /no/file"),
        ("decode", ("--engine", "sim", "--tool-parser", "none-such"), "none-such"),
        ("router", ("--nodes", "http://127.0.0.1:1", "--api-keys", "KEYS"), "line 1: "),
        ("router", ("--nodes", "http://127.0.0.1:1", "--api-keys", "/no/file"), "keys /no/file"),
    ],
)  # fmt: skip
def test_a_role_that_cannot_start_because_of_a_flag_says_which_and_ends_with_its_code(
    command: str, flags: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    """Kubernetes' pods show the code and the last line, from which the operator explains them."""
    keys = tmp_path / "keys"
    keys.write_text("no-key-in-this-line\n")
    done = baton(command, "--port", "0", *(flag.replace("KEYS", str(keys)) for flag in flags))
    assert done.returncode == WRONG_FLAG, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("baton: ")
    assert named in last


def test_generated_node_names_are_unique_within_a_process() -> None:
    options = NodeOptions(engine="sim")
    names = {node_settings(options, each).node for each in ROLES for _ in range(2)}
    assert len(names) == 2 * len(ROLES)
    for each in ROLES:
        assert sum(name.startswith(f"{socket.gethostname()}-{each}-") for name in names) == 2
    assert node_settings(replace(options, node="web-0"), "decode").node == "web-0"


@pytest.mark.parametrize("name", ["two words", "a\nb", "ü", "x" * 254])
def test_a_node_name_that_routers_refuse_is_an_error(name: str) -> None:
    with pytest.raises(CommandError, match="--node"):
        node_settings(NodeOptions(engine="sim", node=name), "decode")
