"""Runs a pool's manifests as processes on this machine, with the commands of its pods.

In: a Pool with a managed store. Out: addresses, after every readiness probe has passed. It differs
from a cluster in three points only: ports and addresses are free ones on the loopback, volumes are
folders below the caller's folder, and a redis-server older than 7 runs without the flag that it
does not know.
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

from baton_cli.commands.up import reserve_port
from baton_kvstore.embedded.redis_binary import find_redis_server
from baton_operator.api.pool import Pool
from baton_operator.builders import Manifest, build_pool
from tests.support.clients.http import exchange
from tests.support.kubernetes.manifests import (
    USER_SECRETS,
    environment,
    expanded,
    secret_values,
    template_of,
)

WAIT_S = 200.0
LOG_TAIL = 4000


def redis_client(url: str, password: str | None = None) -> redis.Redis:
    return redis.Redis.from_url(url, password=password, decode_responses=True)


class ManifestPool:
    """`with ManifestPool(pool, folder) as running:`. Logs and volumes are in `folder`."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._ports: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._manifests = {
            manifest["metadata"]["labels"]["baton.dev/component"]: manifest
            for manifest in build_pool(pool)
            if template_of(manifest) is not None
        }
        self._secrets = secret_values(build_pool(pool)) | USER_SECRETS

    def __enter__(self) -> ManifestPool:
        with self._stack:
            for component, manifest in self._manifests.items():
                assert manifest["spec"]["replicas"] == 1, "one process per workload"
                held = self._stack.enter_context(reserve_port("127.0.0.1", 0))
                self._ports[component] = held.getsockname()[1]
            for component in self._manifests:
                self._start(component)
            for component in self._manifests:
                for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                    if probe in self._container(component):
                        self._await_probe(component, self._container(component)[probe])
            self._await_nodes({"prefill", "decode"})
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack:
            for process in reversed(self._processes.values()):
                process.terminate()
            for component, process in self._processes.items():
                assert process.wait(WAIT_S) == 0, self._log_tail(component)

    def url_of(self, component: str) -> str:
        scheme = "redis" if component.startswith("kv-") else "http"
        return f"{scheme}://127.0.0.1:{self._ports[component]}"

    def pod_name(self, component: str) -> str:
        return f"{component}-pod"

    def log(self, component: str) -> str:
        return (self._folder / f"{component}.log").read_text(errors="replace")

    def command_line(self, component: str) -> str:
        """A component's command line, which every user of the machine can read."""
        return Path(f"/proc/{self._processes[component].pid}/cmdline").read_text()

    def _container(self, component: str) -> Manifest:
        template = template_of(self._manifests[component])
        assert template is not None
        [container] = template["spec"]["containers"]
        return dict(container)

    def _start(self, component: str) -> None:
        container, folders = self._container(component), self._mount(component)
        fields = {"metadata.name": self.pod_name(component), "status.podIP": "127.0.0.1"}
        variables = environment(container, fields, self._secrets)
        arguments = [_moved(argument, folders) for argument in expanded(container, variables)]
        variables = {name: _moved(value, folders) for name, value in variables.items()}
        # With another home than ours, each process imports all of Baton (support/fork_server.py).
        variables.pop("HOME", None)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        with open(self._folder / f"{component}.log", "wb") as log:
            process = subprocess.Popen(
                self._local_command(component, container, arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=inherited | variables,
            )
        self._processes[component] = process
        self._stack.callback(process.wait, WAIT_S)
        self._stack.callback(process.kill)

    def _mount(self, component: str) -> dict[str, str]:
        """Create the folders that replace the component's volumes, and map mount paths to them."""
        template = template_of(self._manifests[component])
        assert template is not None
        folders = {}
        for volume in template["spec"]["volumes"]:
            folder = self._folder / component / volume["name"]
            folder.mkdir(parents=True)
            secret = volume.get("secret", {"items": ()})
            for item in secret["items"]:
                value = self._secrets[secret["secretName"]][item["key"]]
                (folder / item["path"]).write_text(value)
            [path] = [
                mount["mountPath"]
                for mount in self._container(component)["volumeMounts"]
                if mount["name"] == volume["name"]
            ]
            folders[path] = str(folder)
        return folders

    def _local_command(
        self, component: str, container: Manifest, arguments: list[str]
    ) -> list[str]:
        port = self._ports[component]
        own = container["ports"][0]["containerPort"]
        if container["command"] == ["redis-server"]:
            arguments = [str(port) if argument == str(own) else argument for argument in arguments]
            return [*_for_this_server(arguments), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        assert container["command"] == ["baton"]
        arguments = [argument.replace(f":{own}", f":{port}") for argument in arguments]
        arguments = [argument.replace(f"--port={own}", f"--port={port}") for argument in arguments]
        arguments = [argument.replace("0.0.0.0", "127.0.0.1") for argument in arguments]
        # Replace the Services' names by their addresses on this machine.
        index, data = self.url_of("kv-index"), self.url_of("kv-data")
        arguments = [
            re.sub(r"redis://[^:,]*-kv-data-0\.[^:,]*:6379", data, argument)
            for argument in arguments
        ]
        arguments = [
            re.sub(r"redis://[^:,]*-kv-index\.[^:,]*:6379", index, argument)
            for argument in arguments
        ]
        end = f"--supervisor-pid={os.getpid()}"
        return [sys.executable, "-m", "baton_cli", *arguments, end]

    def _await_probe(self, component: str, probe: dict[str, Any]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self._passes(component, probe):
            assert self._processes[component].poll() is None, self._log_tail(component)
            assert time.monotonic() < deadline, (
                f"{probe} of {component}: {self._log_tail(component)}"
            )
            time.sleep(0.05)

    def _await_nodes(self, roles: set[str]) -> None:
        """Wait for a ready node of each role: the router is ready with the first node."""
        deadline = time.monotonic() + WAIT_S
        key = USER_SECRETS["tenants"]["keys.txt"].split()[1]  # ignored by pools without keys
        headers = {"Authorization": f"Bearer {key}"}
        while True:
            nodes = exchange(self.url_of("router"), "/pool", headers=headers).body["nodes"]
            if {node["role"] for node in nodes if node["state"] == "ready"} >= roles:
                return
            assert time.monotonic() < deadline, nodes
            time.sleep(0.05)

    def _passes(self, component: str, probe: dict[str, Any]) -> bool:
        try:
            if "tcpSocket" in probe:
                address = ("127.0.0.1", self._ports[component])
                socket.create_connection(address, probe["timeoutSeconds"]).close()
                return True
            return exchange(self.url_of(component), probe["httpGet"]["path"]).status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _log_tail(self, component: str) -> str:
        return f"{component}: {self.log(component)[-LOG_TAIL:]}"


def _moved(text: str, folders: dict[str, str]) -> str:
    """Replace a mount path, also in a flag's value, by its folder on this machine."""
    flag, equals, value = text.partition("=") if text.startswith("--") else ("", "", text)
    for path, folder in folders.items():
        if value == path or value.startswith(f"{path}/"):
            return flag + equals + folder + value.removeprefix(path)
    return text


def _for_this_server(arguments: list[str]) -> list[str]:
    """The command for this machine's redis-server, without a flag that it does not know."""
    binary = str(find_redis_server())
    output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=WAIT_S)
    version = re.search(r"v=(\d+)", output.stdout)
    assert version is not None, output.stdout
    if int(version[1]) < 7:
        index = arguments.index("--maxmemory-clients")
        arguments = arguments[:index] + arguments[index + 2 :]
    return [binary, *arguments]
