"""Each entry point of Baton, and how one sees that it runs.

In: a port, a model's folder. Out: words for `baton`, and a path that answers 200 as soon as it
serves. None needs another server: the operator's Kubernetes (`KUBECONFIG`) refuses connections.
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
    """For `baton`, and the address that answers."""
    *words, path = (word.format(port=port, model=model) for word in ENTRY_POINTS[name])
    return words, f"http://127.0.0.1:{port}{path}"


def wait_until_it_answers(url: str, ended: Callable[[], bool], log: Callable[[], str]) -> None:
    deadline = time.monotonic() + START_S
    while not _answers(url):
        assert not ended(), log()
        assert time.monotonic() < deadline, log()
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=20) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
