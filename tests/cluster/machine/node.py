"""A node: containerd, kubelet and kube-proxy in namespaces of their own.

In: a name, an index, the cluster's addresses and certificates. Out: a node that registers itself,
and whose pods are real containers. One process id and one mount namespace hold all of it: killing
its first process is what a power cut is to a machine. Nothing of this machine outside the state
folder is written: folders and kernel settings that the programs insist on are covered inside.
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
class Surroundings:
    """What all nodes of a cluster share. Without a disk nodes have no images, not even pause."""

    programs: Path
    disk: Path | None
    state: Path
    server: str
    addresses: Addresses
    network: Network
    processes: Processes


class Node:
    def __init__(self, name: str, index: int, around: Surroundings) -> None:
        self.name = name
        self._index = index
        self._around = around
        self._folder = around.state / name
        self._group = f"{around.addresses.name}-{name}"
        self._enter: tuple[str, ...] = ()

    def start(self) -> None:
        """Its namespaces and containerd; `join` is next. Its disk is as it was left."""
        node_files.write(self._folder, self.name, self._group, self._around.addresses, self._index)
        images = self._folder / CONTAINERD_FOLDER
        if self._around.disk is not None and not images.exists():
            _copy_disk(self._around.disk / CONTAINERD_FOLDER, images)
        self._around.network.add_node(self.name, self._index)
        make_group(self._group)
        self._enter = self._open_namespaces()
        self._run("containerd", "containerd", f"--config={self._folder / 'containerd.toml'}")
        self._until(lambda: self._ctr("version").returncode == 0, "containerd")

    def join(self) -> None:
        """kubelet and kube-proxy: from here on the API server knows it."""
        self.start_kubelet()
        self._run(
            "kube-proxy",
            str(self._around.programs / "kube-proxy"),
            *node_files.proxy_flags(self._around.state, self._around.addresses, self.name),
        )

    def start_kubelet(self) -> None:
        certificates = self._around.state / "certificates"
        kubeconfig = node_files.kubelet_kubeconfig(
            self._folder, self._around.server, certificates, self.name
        )
        self._run(
            "kubelet",
            str(self._around.programs / "kubelet"),
            f"--config={self._folder / 'kubelet.json'}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self._folder / 'kubelet'}",
            f"--cert-dir={self._folder / 'kubelet'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self._around.addresses.node(self._index)}",
        )

    def stop_kubelet(self) -> None:
        self._around.processes.stop(self._process("kubelet"))

    def kill(self) -> None:
        """Everything on it at once, its links included. Its disk stays."""
        for what in ("init", "kubelet", "kube-proxy", "containerd"):
            self._around.processes.stop(self._process(what))
        # The kernel has sent them the signal already; here we wait until they are gone.
        kill_all(members(self._group))
        self._around.network.remove_node(self.name)
        remove_groups(self._group)

    def import_image(self, archive: Path) -> None:
        done = self._ctr("-n", "k8s.io", "images", "import", str(archive))
        assert not done.returncode, f"{self.name}: {archive}: {done.stderr}"

    def _open_namespaces(self) -> tuple[str, ...]:
        """Words before a command that shall run on this node."""
        around = self._around
        pause = around.programs / "pause"
        script = node_files.init_script(self._folder, pause)
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        words = [*around.network.enter(self.name), *unshare, "sh", "-c", script]
        outer = psutil.Process(around.processes.start(self._process("init"), words))
        # It has become `pause` when every mount is made.
        self._until(lambda: [one.name() for one in outer.children()] == [pause.name], "init")
        target = outer.children()[0].pid
        return ("nsenter", f"--target={target}", "--mount", "--pid", "--net")

    def _run(self, what: str, *words: str) -> None:
        self._around.processes.start(self._process(what), [*self._enter, *words])

    def _ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*self._enter, "ctr", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S)

    def _process(self, what: str) -> str:
        return f"{self.name}-{what}"

    def _until(self, done: Callable[[], bool], what: str) -> None:
        name = self._process(what)
        deadline = time.monotonic() + START_S
        while not done():
            if name in self._around.processes.ended() or time.monotonic() > deadline:
                raise RuntimeError(f"{name}: {self._around.processes.log_tail(name)}")
            time.sleep(0.05)


def _copy_disk(source: Path, copy: Path) -> None:
    """Files of images are links: nobody writes into them. The databases are copies."""
    subprocess.run(["cp", "--archive", "--link", source, copy], check=True)
    for database in copy.rglob("*.db"):
        database.unlink()
        shutil.copy2(source / database.relative_to(copy), database)
