"""What `baton up` finds wrong before it starts anything: one clear line, exit 1, quickly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REFUSED_BY = 120.0  # seconds; nothing that takes a second may have been started
SIM = ("--engine", "sim")


def refusal(*flags: str) -> str:
    """The one line on stderr."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    done = subprocess.run(
        [sys.executable, "-m", "baton", "up", *flags],
        env=inherited,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=REFUSED_BY,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("listening", [True, False])
def test_a_port_in_use(listening: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if listening:
            taken.listen()
        port = taken.getsockname()[1]
        line = refusal(*SIM, "--port", str(port))
    assert line == (
        f"baton: cannot listen on 127.0.0.1:{port}: Address already in use; give another --port"
    )


def test_an_address_that_is_not_this_machine_s() -> None:
    line = refusal(*SIM, "--host", "192.0.2.1", "--port", "0")
    assert line.startswith("baton: cannot listen on 192.0.2.1:0: Cannot assign requested address")


def test_a_model_folder_that_is_none(tmp_path: Path) -> None:
    assert refusal("--model", str(tmp_path)) == (
        f"baton: --model {tmp_path} is no model folder: it holds no config.json"
    )
    assert refusal("--model", "/no/such/folder") == (
        "baton: --model /no/such/folder: there is no such folder"
    )


def test_no_model() -> None:
    assert refusal().startswith("baton: --model is missing")


def test_a_redis_that_cannot_be_reached() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        url = f"redis://:secret@127.0.0.1:{port}"
        data = f"redis://:secret@localhost:{port}"
        line = refusal(*SIM, "--port", "0", "--redis-index", url, "--redis-data", data)
    assert f"127.0.0.1:{port}" in line
    assert "secret" not in line


def test_half_a_store() -> None:
    line = refusal(*SIM, "--port", "0", "--redis-index", "redis://127.0.0.1:1")
    assert line == "baton: give both --redis-index and --redis-data, or neither"


def test_a_pool_of_nobody() -> None:
    line = refusal(*SIM, "--prefill", "0", "--decode", "0")
    assert line.endswith("leaves nobody to answer; give at least one node")


def test_a_role_that_is_missing_for_good_and_has_no_stand_in() -> None:
    assert refusal(*SIM, "--prefill", "0", "--missing-role", "queue") == (
        "baton: --prefill 0 with --missing-role queue leaves nobody to do a prefill node's work;"
        " give --missing-role aggregate"
    )


def test_a_chat_template_that_is_not_there() -> None:
    line = refusal(*SIM, "--chat-template", "/no/such.jinja")
    assert line == "baton: --chat-template /no/such.jinja: there is no such file"


def test_weights_that_cannot_be_read_end_the_start_with_one_reason(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Found by an engine process, minutes of restarts later if nobody gave up."""
    source = tiny_model("llama-gqa1")
    for path in source.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    done = subprocess.run(
        [sys.executable, "-m", "baton", "up", "--model", str(tmp_path), "--port", "0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "while starting: " in last
    assert "model.safetensors" in last
