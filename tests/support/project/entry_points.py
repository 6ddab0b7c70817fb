"""Baton's entry points, and a path of each that shows that it serves.

In: a port, a model's folder. Out: arguments for `baton`, and a path that answers 200 as soon as the
process serves. No entry point needs another server: KUBECONFIG names a Kubernetes that refuses
connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.error import URLError
from urllib.request import urlopen

# A user id that no /etc/passwd lists.
UNKNOWN_UID = 54321
START_S = 300.0
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: closed
clusters: [{name: closed, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: nobody, user: {token: none}}]
contexts: [{name: closed, context: {cluster: closed, user: nobody}}]
"""
_IMAGES = ("--node-image=node:1", "--router-image=router:1", "--redis-image=redis:7")
_SIM = ("--engine=sim", "--chunk-blocks=1")
_TORCH = ("--threads=1", "--kv-blocks=100")
ENTRY_POINTS = {
    "operator": ("operator", *_IMAGES, "--health-port={port}", "--metrics-port=0", "/healthz"),
    "router": ("router", "--nodes=http://127.0.0.1:1", "--port={port}", "/health"),
    "sim prefill": ("prefill", *_SIM, "--port={port}", "/ready"),
    "sim decode": ("decode", *_SIM, "--port={port}", "/ready"),
    "torch decode": ("decode", "--model={model}", *_TORCH, "--port={port}", "/ready"),
}


def words_of(name: str, port: int, model: str = "") -> tuple[list[str], str]:
    """Return the arguments for `baton`, and the URL that answers when it serves."""
    *arguments, path = (argument.format(port=port, model=model) for argument in ENTRY_POINTS[name])
    return arguments, f"http://127.0.0.1:{port}{path}"


def wait_until_it_answers(url: str, ended: Callable[[], bool], log: Callable[[], str]) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(url):
        assert not ended(), log()
        assert time.monotonic() < deadline, log()
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=20) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False
