"""Each entry point runs as a user id that /etc/passwd does not list, as containers do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from baton.up import reserve_port
from tests.support.needs import needs

UID = 54321
START_S = 300.0
# It may read this checkout and its Python wherever they lie; nothing else of root's.
AS_UNKNOWN = (
    *("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search", "--pdeathsig=KILL"),
)
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: closed
clusters: [{name: closed, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: nobody, user: {token: none}}]
contexts: [{name: closed, context: {cluster: closed, user: nobody}}]
"""
IMAGES = ("--node-image=node:1", "--router-image=router:1", "--redis-image=redis:7")
SIM = ("--engine=sim", "--chunk-blocks=1")
TORCH = ("--threads=1", "--kv-blocks=100")
# The word that starts it, the flag of its port, a path that answers 200 once it runs.
COMMANDS = {
    "operator": ("operator", *IMAGES, "--health-port={port}", "/healthz"),
    "router": ("router", "--nodes=http://127.0.0.1:1", "--port={port}", "/health"),
    "sim prefill": ("prefill", *SIM, "--port={port}", "/ready"),
    "sim decode": ("decode", *SIM, "--port={port}", "/ready"),
    "torch decode": ("decode", "--model={model}", *TORCH, "--port={port}", "/ready"),
}


def environment(folder: Path, home: str | None) -> dict[str, str]:
    """Nothing in it names a user."""
    found = {"PATH": os.environ["PATH"], "KUBECONFIG": str(folder / "kubeconfig")}
    if home is not None:
        found["HOME"] = home
    return found


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=20) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


# Images and the chart set HOME. The operator needs it: Kubernetes' client asks for it on import.
CASES = [(name, "/tmp") for name in COMMANDS] + [
    (name, None) for name in COMMANDS if name != "operator"
]


@pytest.mark.parametrize(("name", "home"), CASES)
def test_it_starts_as_a_user_that_passwd_does_not_list(
    name: str, home: str | None, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    needs("root")
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    log = tmp_path / "log"
    with reserve_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        model = tiny_model("llama-gqa1") if "torch" in name else ""
        *words, path = (word.format(port=port, model=model) for word in COMMANDS[name])
        with (
            log.open("wb") as output,
            subprocess.Popen(
                [*AS_UNKNOWN, sys.executable, "-m", "baton", *words],
                env=environment(tmp_path, home),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            ) as process,
        ):
            try:
                deadline = time.monotonic() + START_S
                while not answers(f"http://127.0.0.1:{port}{path}"):
                    assert process.poll() is None, log.read_text()
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.1)
            finally:
                process.terminate()
                process.wait(START_S)
