"""A node: containerd, kubelet and kube-proxy in namespaces of their own.

In: a name, an index, the cluster's addresses and certificates. Out: a node that registers itself
and whose pods are real containers. Its processes share a PID and a mount namespace, so killing the
first process kills all of them like a power cut. The node writes nothing outside its state folder:
inside its namespaces, mounts cover the folders and kernel settings that its programs write to.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cluster.machine import node_files
from tests.cluster.machine.addresses import Addresses
from tests.cluster.machine.cgroups import make_group, members, remove_groups
from tests.cluster.machine.network import Network
from tests.cluster.machine.processes import Processes, kill_all

START_S = 200.0
IMPORT_S = 400.0
CONTAINERD_FOLDER = "containerd"


@dataclass(frozen=True)
class NodeContext:
    """What all nodes of a cluster share. With `disk` None, nodes have no images, not even pause."""

    programs: Path
    disk: Path | None
    state: Path
    server: str
    addresses: Addresses
    network: Network
    processes: Processes


class Node:
    def __init__(self, name: str, index: int, context: NodeContext) -> None:
        self.name = name
        self._index = index
        self._context = context
        self._folder = context.state / name
        self._group = f"{context.addresses.name}-{name}"
        self._enter: tuple[str, ...] = ()

    def start(self) -> None:
        """Create the namespaces and start containerd on the old disk; call `join` next."""
        node_files.write(self._folder, self.name, self._group, self._context.addresses, self._index)
        images = self._folder / CONTAINERD_FOLDER
        if self._context.disk is not None and not images.exists():
            _copy_disk(self._context.disk / CONTAINERD_FOLDER, images)
        self._context.network.add_node(self.name, self._index)
        make_group(self._group)
        self._enter = self._open_namespaces()
        self._run("containerd", "containerd", f"--config={self._folder / 'containerd.toml'}")
        self._until(lambda: self._ctr("version").returncode == 0, "containerd")

    def join(self) -> None:
        """Start kubelet, which registers the node, and kube-proxy."""
        self.start_kubelet()
        self._run(
            "kube-proxy",
            str(self._context.programs / "kube-proxy"),
            *node_files.proxy_flags(self._context.state, self._context.addresses, self.name),
        )

    def start_kubelet(self) -> None:
        certificates = self._context.state / "certificates"
        kubeconfig = node_files.kubelet_kubeconfig(
            self._folder, self._context.server, certificates, self.name
        )
        self._run(
            "kubelet",
            str(self._context.programs / "kubelet"),
            f"--config={self._folder / 'kubelet.json'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self._folder / 'kubelet'}",
            f"--cert-dir={self._folder / 'kubelet'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self._context.addresses.node(self._index)}",
        )

    def stop_kubelet(self) -> None:
        self._context.processes.stop(self._process("kubelet"))

    def kill(self) -> None:
        """Kill all processes at once and remove the links. The disk stays."""
        for what in ("init", "kubelet", "kube-proxy", "containerd"):
            self._context.processes.stop(self._process(what))
        # The kernel has already sent SIGKILL to them; this waits until they are gone.
        kill_all(members(self._group))
        self._context.network.remove_node(self.name)
        remove_groups(self._group)

    def import_image(self, archive: Path) -> None:
        done = self._ctr("-n", "k8s.io", "images", "import", str(archive))
        assert not done.returncode, f"{self.name}: {archive}: {done.stderr}"

    def _open_namespaces(self) -> tuple[str, ...]:
        """Create the namespaces; return a command prefix that enters them."""
        context = self._context
        pause = context.programs / "pause"
        script = node_files.init_script(self._folder, pause)
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        args = [*context.network.enter(self.name), *unshare, "sh", "-c", script]
        outer = psutil.Process(context.processes.start(self._process("init"), args))
        # The script makes all mounts before it replaces itself by `pause`.
        self._until(lambda: [one.name() for one in outer.children()] == [pause.name], "init")
        target = outer.children()[0].pid
        return ("nsenter", f"--target={target}", "--mount", "--pid", "--net")

    def _run(self, what: str, *args: str) -> None:
        self._context.processes.start(self._process(what), [*self._enter, *args])

    def _ctr(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [*self._enter, "ctr", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S)

    def _process(self, what: str) -> str:
        return f"{self.name}-{what}"

    def _until(self, done: Callable[[], bool], what: str) -> None:
        name = self._process(what)
        deadline = time.monotonic() + START_S
        while not done():
            if name in self._context.processes.ended() or time.monotonic() > deadline:
                raise RuntimeError(f"{name}: {self._context.processes.log_tail(name)}")
            time.sleep(0.05)


def _copy_disk(source: Path, copy: Path) -> None:
    """Copy a disk. Image files become hard links, because nothing writes to them."""
    subprocess.run(["cp", "--archive", "--link", source, copy], check=True)
    for database in copy.rglob("*.db"):
        database.unlink()
        shutil.copy2(source / database.relative_to(copy), database)
