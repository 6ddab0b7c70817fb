"""A pool's manifests run as processes of this machine: the commands that its pods would run.

In: a Pool with a managed store. Out: addresses, after every readiness probe passed. Stands in for
cluster and images in two things only: ports and addresses are replaced by free ones of the
loopback, and a redis-server older than 7 is spared the flag that it does not know.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from baton.up import reserve_port
from baton_kvstore.binary import find_redis_server
from baton_operator.builders import build_pool
from baton_operator.builders.child import Manifest
from baton_operator.pool import Pool
from tests.support.http import exchange
from tests.support.manifests import containers, expanded

WAIT_S = 60.0
LOG_TAIL = 4000


def redis_client(url: str) -> redis.Redis:
    return redis.Redis.from_url(url, decode_responses=True)


class ManifestPool:
    """`with ManifestPool(pool, folder) as running:`; logs lie in `folder`."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder
        self._stack = ExitStack()
        self._ports: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> ManifestPool:
        with self._stack:
            pods = [
                (manifest["metadata"]["labels"]["app.kubernetes.io/component"], manifest, container)
                for manifest in build_pool(self._pool)
                for container in containers(manifest)
            ]
            for component, manifest, _ in pods:
                assert manifest["spec"]["replicas"] == 1, "one process per workload"
                held = self._stack.enter_context(reserve_port("127.0.0.1", 0))
                self._ports[component] = held.getsockname()[1]
            for component, manifest, container in pods:
                self._start(component, self._words(component, manifest, container))
            for component, _, container in pods:
                self._await_probe(component, container["readinessProbe"])
                self._await_probe(component, container["livenessProbe"])
            self._await_nodes({"prefill", "decode"})
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            for process in reversed(self._processes.values()):
                process.terminate()
            for component, process in self._processes.items():
                assert process.wait(WAIT_S) == 0, self._log(component)

    def url_of(self, component: str) -> str:
        scheme = "redis" if component.startswith("kv-") else "http"
        return f"{scheme}://127.0.0.1:{self._ports[component]}"

    def pod_name(self, component: str) -> str:
        return f"{component}-pod"

    def _words(self, component: str, manifest: Manifest, container: Manifest) -> list[str]:
        port = self._ports[component]
        words = expanded(container, {"POD_NAME": self.pod_name(component), "POD_IP": "127.0.0.1"})
        own = container["ports"][0]["containerPort"]
        if container["command"] == ["redis-server"]:
            words = [str(port) if word == str(own) else word for word in words]
            return [*_for_this_server(words), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        assert container["command"] == ["baton"]
        words = [word.replace(f":{own}", f":{port}") for word in words]
        words = [word.replace(f"--port={own}", f"--port={port}") for word in words]
        words = [word.replace("0.0.0.0", "127.0.0.1") for word in words]
        # What the Services' names stand for.
        index, data = self.url_of("kv-index"), self.url_of("kv-data")
        words = [re.sub(r"redis://[^:,]*-kv-data-0\.[^:,]*:6379", data, word) for word in words]
        words = [re.sub(r"redis://[^:,]*-kv-index\.[^:,]*:6379", index, word) for word in words]
        end = f"--supervisor-pid={os.getpid()}"
        return [sys.executable, "-m", "baton", *words, end]

    def _start(self, component: str, words: list[str]) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        with open(self._folder / f"{component}.log", "wb") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=inherited
            )
        self._processes[component] = process
        self._stack.callback(process.wait, WAIT_S)
        self._stack.callback(process.kill)

    def _await_probe(self, component: str, probe: dict[str, Any]) -> None:
        until = time.monotonic() + WAIT_S
        while not self._passes(component, probe):
            assert self._processes[component].poll() is None, self._log(component)
            assert time.monotonic() < until, f"{probe} of {component}: {self._log(component)}"
            time.sleep(0.05)

    def _await_nodes(self, roles: set[str]) -> None:
        """The router is ready with the first node; these tests want one of each role."""
        until = time.monotonic() + WAIT_S
        while True:
            nodes = exchange(self.url_of("router"), "/pool").body["nodes"]
            if {node["role"] for node in nodes if node["state"] == "ready"} >= roles:
                return
            assert time.monotonic() < until, nodes
            time.sleep(0.05)

    def _passes(self, component: str, probe: dict[str, Any]) -> bool:
        try:
            if "tcpSocket" in probe:
                where = ("127.0.0.1", self._ports[component])
                socket.create_connection(where, probe["timeoutSeconds"]).close()
                return True
            return exchange(self.url_of(component), probe["httpGet"]["path"]).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _log(self, component: str) -> str:
        log = (self._folder / f"{component}.log").read_text(errors="replace")
        return f"{component}: {log[-LOG_TAIL:]}"


def _for_this_server(words: list[str]) -> list[str]:
    """The command with this machine's redis-server, without what only newer ones know."""
    binary = str(find_redis_server())
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=WAIT_S)
    version = re.search(r"v=(\d+)", said.stdout)
    assert version is not None, said.stdout
    if int(version[1]) < 7:
        place = words.index("--maxmemory-clients")
        words = words[:place] + words[place + 2 :]
    return [binary, *words]
