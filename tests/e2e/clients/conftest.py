"""Two pools that the clients' tests share, and no way out of this machine for the clients."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.pools.baton_up import Pool

# Read when they are imported, or when they first answer: no reports, no price lists.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

HERE = ("127.0.0.1", "localhost")


@pytest.fixture(autouse=True)
def _no_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for a host elsewhere is told that there is none."""
    look_up = socket.getaddrinfo

    def local_only(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in HERE:
            raise socket.gaierror(f"a client asks for {host}")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", local_only)


@pytest.fixture(scope="module")
def sim() -> Iterator[Pool]:
    """Answers are random bytes, of which a grammar makes what was asked."""
    flags = ("--engine", "sim", "--prefill", "1", "--decode", "1", "--sim-eos-every", "5")
    with Pool([*flags, "--handoff", "always", "--chunk-blocks", "1"]) as pool:
        yield pool


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[Pool]:
    """A model that knows what it is asked, more or less."""
    flags = ("--model", str(demo_model), "--prefill", "1", "--decode", "1", "--threads", "1")
    with Pool([*flags, "--served-model-name", "demo", "--handoff", "always"]) as pool:
        yield pool


@pytest.fixture
def client(sim: Pool) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{sim.url}/v1", api_key="none", max_retries=0) as made:
        yield made
