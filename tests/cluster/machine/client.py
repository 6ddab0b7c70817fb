"""A Kubernetes cluster as its users have it: a kubeconfig, kubectl and helm.

In: a kubeconfig and a folder for caches. Out: the commands' output, or CommandFailed with their
error output. Tests get a cluster of our own (ControlPlane, Cluster), or this class itself for an
existing cluster; there, methods that would break the cluster skip the test.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tests.support.needs import needs

COMMAND_TIMEOUT_S = 400.0


class CommandFailed(Exception):
    """kubectl or helm exited with a code other than 0."""

    def __init__(self, args: Sequence[str], code: int, output: str, error: str) -> None:
        super().__init__(f"{' '.join(args)}: code {code}: {error.strip()}")
        self.code = code
        self.output = output
        self.error = error


class Kubernetes:
    def __init__(self, kubeconfig: Path, programs: Path, state: Path) -> None:
        self.kubeconfig = kubeconfig
        self._programs = programs
        self._state = state

    def kubectl(
        self, *args: str, stdin: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> str:
        """Run kubectl and return its output. `stdin` is for `apply -f -`."""
        return _run(self._kubectl_command(*args), stdin, {"KUBERC": "off"}, timeout_s)

    @contextmanager
    def following(self, *args: str) -> Iterator[list[str]]:
        """Run kubectl while the block runs. The list grows with the lines that it prints."""
        lines: list[str] = []

        def read(printed: IO[str]) -> None:
            for line in printed:
                lines.append(line.rstrip("\n"))

        with subprocess.Popen(
            self._kubectl_command(*args),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            reader = threading.Thread(target=read, args=(process.stdout,))
            reader.start()
            try:
                yield lines
            finally:
                process.kill()
                reader.join()

    def helm(
        self, *args: str, stdin: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> str:
        homes = {
            f"HELM_{kind.upper()}_HOME": str(self._state / "helm" / kind)
            for kind in ("cache", "config", "data")
        }
        command = [str(self._programs / "helm"), f"--kubeconfig={self.kubeconfig}", *args]
        return _run(command, stdin, homes, timeout_s)

    def new_namespace(self, **labels: str) -> str:
        """The name of an empty namespace in which pods can be created at once."""
        name = f"test-{uuid.uuid4().hex[:8]}"
        self.kubectl("create", "namespace", name)
        if labels:
            pairs = [f"{key}={value}" for key, value in labels.items()]
            self.kubectl("label", "namespace", name, *pairs)
        # Controllers create these objects in each namespace; after that it stays unchanged.
        defaults = ("serviceaccount/default", "configmap/kube-root-ca.crt")
        self.kubectl("wait", "--for=create", *defaults, "-n", name, "--timeout=180s")
        return name

    def delete_namespace(self, name: str) -> None:
        """Start the deletion without waiting: no test uses the name again."""
        self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def stop_apiserver(self) -> None:
        needs("own_cluster")

    def start_apiserver(self) -> None:
        needs("own_cluster")

    @property
    def nodes(self) -> list[str]:
        """The names of the cluster's nodes."""
        return self.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()

    @property
    def host_address(self) -> str:
        """This machine's address as pods see it, for servers that a test runs itself."""
        needs("own_cluster")
        return ""

    def kill_node(self, name: str) -> None:
        """Kill a node like a power cut: no process on it can handle a signal."""
        needs("own_cluster")

    def start_node(self, name: str) -> None:
        """Start a killed node with its old disk, and wait until it is Ready."""
        needs("own_cluster")

    def restart_kubelet(self, name: str) -> None:
        """Restart the kubelet while pods keep running, and wait for the node's next report."""
        needs("own_cluster")

    def set_gpus(self, node: str, count: int) -> None:
        """Make the node report `count` GPUs, which no container can use."""
        needs("own_cluster")

    def import_image(self, archive: Path) -> None:
        """Import an image into every node. Nodes of an existing cluster must already have it."""

    @contextmanager
    def reach(self, namespace: str, service: str, port: int) -> Iterator[str]:
        """The URL of a service from this machine: here by a port forward."""
        args = self._kubectl_command(
            "port-forward", "-n", namespace, f"service/{service}", f":{port}"
        )
        with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as forward:
            assert forward.stdout is not None
            line = forward.stdout.readline()
            try:
                forwarded = re.search(r"127\.0\.0\.1:(\d+)", line)
                assert forwarded, f"kubectl port-forward to {service} printed {line!r}"
                yield f"http://127.0.0.1:{forwarded[1]}"
            finally:
                forward.kill()

    def _kubectl_command(self, *args: str) -> list[str]:
        cache = f"--cache-dir={self._state / 'kubectl'}"
        return [str(self._programs / "kubectl"), f"--kubeconfig={self.kubeconfig}", cache, *args]


def _run(
    command: list[str], stdin: str | None, variables: Mapping[str, str], timeout_s: float
) -> str:
    done = subprocess.run(
        command,
        input=stdin if stdin is not None else "",
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        args = [Path(command[0]).name, *command[2:]]
        raise CommandFailed(args, done.returncode, done.stdout, done.stderr)
    return done.stdout
