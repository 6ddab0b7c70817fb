"""Tests of `baton model fetch`: a hub with a small model, and processes that fetch it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton_cli.commands.fetch_options import FetchOptions
from baton_cli.commands.model_fetch import make_fetch
from baton_cli.models.download_state import MARKER, PART, PLAN
from baton_cli.models.model_fetch import ModelFetch
from baton_engine.weights.digest import CACHE_NAME
from tests.support.hubs.stub_hub import StubHub

# A safetensors file of 1 MiB in which no two parts are equal.
DATA = b"%08d" * 131046 % tuple(range(131046))
TENSOR = {"dtype": "U8", "shape": [len(DATA)], "data_offsets": [0, len(DATA)]}
WEIGHTS = struct.pack("<Q", 200) + json.dumps({"t": TENSOR}).encode().ljust(200) + DATA
FILES = {
    "config.json": b'{"architectures": []}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": WEIGHTS,
    "empty.json": b"",
}
UNREAD = {
    "README.md": b"x",
    "pytorch_model.bin": b"x",
    "consolidated.safetensors": b"x",
    "onnx/config.json": b"{}",
    ".x.json": b"{}",
}
DEADLINE_S = 180.0


@contextlib.contextmanager
def model_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    """Run a stub hub, and point HF_ENDPOINT to it."""
    for name in ("HF_TOKEN", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with StubHub({**FILES, **UNREAD}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def fetch_of(to: Path, source: str = "hf://org/model", **options: Any) -> ModelFetch:
    return make_fetch(FetchOptions(source=source, to=str(to), **options), os.environ)


def fetch(to: Path, source: str = "hf://org/model", pauses_s: tuple[float, ...] = ()) -> Path:
    one_fetch = fetch_of(to, source)
    asyncio.run(replace(one_fetch, pauses_s=pauses_s).run())
    return one_fetch.folder.path


def start(to: Path, *, before: str = "") -> subprocess.Popen[str]:
    """Start a fetch into `to`. `before` is Python code that the process runs first."""
    code = f"{before}\nimport sys; from baton_cli.main import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.Popen(
        [sys.executable, "-c", code, "model", "fetch", "hf://org/model", f"--to={to}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def contents(folder: Path) -> dict[str, bytes]:
    own = (MARKER, CACHE_NAME)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in own}


def interrupt(folder: Path, part: bytes) -> None:
    """Turn a complete folder into one whose fetch died while it downloaded the weights; `part` is
    the partial file's content."""
    (folder / MARKER).rename(folder / PLAN)
    (folder / "model.safetensors").unlink()
    (folder / f"model.safetensors.gone{PART}").write_bytes(part)
