"""A complete Kubernetes cluster on this machine: a control plane and nodes that run containers.

In: the programs, the nodes' disk, a slot (see `addresses`). Out: about 10 s later, a cluster whose
pods, services and API server this machine reaches by their addresses. The cluster can reach only
this machine. Closing it removes its processes, mounts, control groups, network namespaces, routes
and files. Each start first removes the left-overs of a killed run in its slot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.machine import dns
from tests.cluster.machine.certificates import node_holder, write_kubeconfig
from tests.cluster.machine.control_plane import ControlPlane, Site
from tests.cluster.machine.network import CORE
from tests.cluster.machine.node import Node, NodeContext
from tests.cluster.machine.node_files import proxy_flags
from tests.cluster.machine.sweep import Slot

NODES = ("node-1", "node-2")


class Cluster(ControlPlane):
    """`with Cluster(programs, disk, slot) as one:` boots it and removes it."""

    def __init__(self, programs: Path, disk: Path, slot: Slot) -> None:
        slot.sweep()
        super().__init__(programs, slot.state, _site(slot))
        self._slot = slot
        self._network = slot.network
        context = NodeContext(
            programs, disk, slot.state, self.url, slot.addresses, slot.network, self._processes
        )
        self._nodes = {name: Node(name, at, context) for at, name in enumerate(NODES, start=1)}

    @property
    def host_address(self) -> str:
        """This machine's address as pods see it, for servers that a test runs itself."""
        return self._slot.addresses.host

    def boot(self) -> None:
        self._network.up()
        super().boot()
        write_kubeconfig(
            self._state / "kube-proxy.conf", self.url, self._certificates, "kube-proxy"
        )
        with ThreadPoolExecutor(len(NODES)) as pool:
            list(pool.map(self._boot_node, self._nodes.values()))
        self._start_dns()
        # This machine's connections to services pass `core`. It is no node, so use a node's name.
        flags = proxy_flags(self._state, self._slot.addresses, NODES[0])
        self._start("kube-proxy", ["kube-proxy", *flags])
        for name in NODES:
            self._wait_ready(name)

    def kill_node(self, name: str) -> None:
        """Kill a node like a power cut: no process on it can handle a signal."""
        self._nodes[name].kill()

    def start_node(self, name: str) -> None:
        """Start a killed node with its old disk, and wait until it is Ready."""
        self._nodes[name].start()
        self._nodes[name].join()
        self._wait_ready(name)

    def restart_kubelet(self, name: str) -> None:
        """Restart the kubelet while pods keep running, and wait for the node's next report."""
        self._nodes[name].stop_kubelet()
        before = self._last_report(name)
        self._nodes[name].start_kubelet()
        self._until(
            f"{name}'s report", lambda: "" if self._last_report(name) != before else "none yet"
        )

    def import_image(self, archive: Path) -> None:
        """Import an image into every node; `archive` is a tar file written by `images`."""
        with ThreadPoolExecutor(len(NODES)) as pool:
            list(pool.map(lambda node: node.import_image(archive), self._nodes.values()))

    def set_gpus(self, node: str, count: int) -> None:
        """Make the node report `count` GPUs, which no container can use."""
        amounts = {"nvidia.com/gpu": str(count)}
        patch = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)

    @contextmanager
    def reach(self, namespace: str, service: str, port: int) -> Iterator[str]:
        address = self.kubectl(
            "get", "service", service, "-n", namespace, "-o", "jsonpath={.spec.clusterIP}"
        )
        yield f"http://{address}:{port}"

    def close(self) -> None:
        self._processes.close()
        self._slot.sweep()

    def _boot_node(self, node: Node) -> None:
        node.start()
        node.join()

    def _start_dns(self) -> None:
        self.kubectl("apply", "-f", "-", stdin=dns.rights())
        config = write_kubeconfig(self._state / "dns.conf", self.url, self._certificates, "dns")
        address = self._slot.addresses.core
        corefile = dns.write_corefile(self._state / "Corefile", address, config)
        self._start("coredns", ["coredns", f"-conf={corefile}"])

    def _wait_ready(self, name: str) -> None:
        self._wait_for(
            f"node {name}", "wait", "--for=condition=Ready", f"node/{name}", "--timeout=60s"
        )

    def _last_report(self, name: str) -> str:
        where = "jsonpath={.spec.renewTime}"
        return self.kubectl("get", "lease", name, "-n", "kube-node-lease", "-o", where)


def _site(slot: Slot) -> Site:
    addresses = slot.addresses
    return Site(
        addresses.core,
        apiserver_port=6443,
        etcd_port=2379,
        peer_port=2380,
        services=addresses.services,
        first_service_address=addresses.first_service,
        enter=slot.network.enter(CORE),
        holders=tuple(node_holder(name, addresses.node(at)) for at, name in enumerate(NODES, 1)),
        # The default grace period is 50 s. 20 s still tolerate a kubelet that a busy machine delays
        # for 10 s.
        controller_flags=("--node-monitor-grace-period=20s", "--node-monitor-period=1s"),
    )
