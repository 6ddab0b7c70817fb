"""Two pools that the tests of clients share. Clients cannot reach other hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.pools.baton_up import Pool

# The libraries read these at import or at the first response: no tracing, no download of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ["LANGSMITH_TRACING"] = "false"

LOCAL_HOSTS = ("127.0.0.1", "localhost")


@pytest.fixture(autouse=True)
def _local_hosts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups of other hosts fail."""
    look_up = socket.getaddrinfo

    def local_only(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in LOCAL_HOSTS:
            raise socket.gaierror(f"a client looks up {host}")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", local_only)


@pytest.fixture(scope="module")
def sim() -> Iterator[Pool]:
    """A pool with the simulated engine. Its output is random bytes, which a grammar constrains."""
    flags = ("--engine", "sim", "--prefill", "1", "--decode", "1", "--sim-eos-every", "5")
    with Pool([*flags, "--handoff", "always", "--chunk-blocks", "1"]) as pool:
        yield pool


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[Pool]:
    """A node with the demo model, which can answer simple questions. The simulated pool shows that
    clients do not notice a hand-off."""
    flags = ["--model", str(demo_model), "--prefill", "0", "--decode", "1", "--threads", "1"]
    flags += ["--kv-memory", "64MiB"]  # the default takes a second for each engine
    with Pool([*flags, "--served-model-name", "demo"]) as pool:
        yield pool


@pytest.fixture
def client(sim: Pool) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{sim.url}/v1", api_key="none", max_retries=0) as api:
        yield api
