"""Errors that `baton up` finds before it starts anything: one line and exit code 1."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.project.command import baton, baton_process

pytestmark = pytest.mark.integration

SIM = ("--engine", "sim", "--port", "0")
REDIS = "redis://127.0.0.1:1"


def refusal(*flags: str) -> str:
    """The one line on stderr."""
    done = baton("up", *flags)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    """A bound socket, whose port no other process can take."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


@pytest.mark.parametrize("listening", [True, False])
def test_a_port_in_use_is_refused(taken: socket.socket, listening: bool) -> None:
    if listening:
        taken.listen()
    port = taken.getsockname()[1]
    line = refusal(*SIM, "--port", str(port))
    assert line.startswith(f"baton: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert line.endswith("; give another --port")
    assert (f" by pid {os.getpid()} (" in line) is listening


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "0"], "--model is missing"),
        (["--model", "/no/such"], "--model /no/such: the folder does not exist\n"),
        (
            [*SIM, "--host", "192.0.2.1"],
            "cannot listen on 192.0.2.1:0: Cannot assign requested address",
        ),
        ([*SIM, "--redis-index", REDIS], "give both --redis-index and --redis-data, or neither\n"),
        (
            [*SIM, "--prefill", "0", "--decode", "0"],
            "--prefill 0 --decode 0 leaves no node to answer; give at least one node\n",
        ),
        (
            [*SIM, "--prefill", "0", "--missing-role", "queue"],
            "--prefill 0 with --missing-role queue leaves no node for the work of a prefill node;"
            " give --missing-role aggregate\n",
        ),
        (
            [*SIM, "--chat-template", "/no/such.jinja"],
            "--chat-template /no/such.jinja: the file does not exist\n",
        ),
        ([*SIM, "--tool-parser", "nope"], "no tool parser is named 'nope'; there are "),
        ([*SIM, "--reasoning-parser", "nope"], "no reasoning parser is named 'nope'; there are "),
    ],
)
def test_flags_that_make_no_pool_are_refused(flags: list[str], message: str) -> None:
    assert f"{refusal(*flags)}\n".startswith(f"baton: {message}")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    assert refusal("--model", str(tmp_path)) == (
        f"baton: --model {tmp_path} is not a model folder: it has no config.json; fetch the "
        "whole model (baton model fetch hf://ORG/NAME --to DIR)"
    )


def test_an_unreachable_redis_is_named_without_its_password(taken: socket.socket) -> None:
    port = taken.getsockname()[1]
    url = f"redis://:secret@127.0.0.1:{port}"
    data = f"redis://:secret@localhost:{port}"
    line = refusal(*SIM, "--redis-index", url, "--redis-data", data)
    assert f"127.0.0.1:{port}" in line
    assert "secret" not in line


def test_unreadable_weights_end_the_start_with_one_reason(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """An engine process finds them, so the supervisor must give up instead of restarting it."""
    source = tiny_model("llama-gqa1")
    for path in source.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    done = baton_process("up", "--model", str(tmp_path), "--port", "0", "--prefill", "0")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "while starting: " in last
    assert "model.safetensors" in last
