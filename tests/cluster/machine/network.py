"""A cluster's network: network namespaces that cannot reach other networks.

In: the addresses of one slot, a folder. Out: network namespaces (files in that folder), the links
between them, and this machine's routes to pods, services and nodes. While the namespaces do not
exist, blackhole routes drop packets to those addresses, so that none leaves through this machine's
default route.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.cluster.machine.addresses import Addresses

CORE = "core"
REMOVE_S = 60.0
# The worst metric, so that any other route takes precedence.
_LAST = ("metric", "9999")


class Network:
    def __init__(self, addresses: Addresses, folder: Path) -> None:
        self._addresses = addresses
        self._folder = folder

    def enter(self, name: str) -> tuple[str, ...]:
        """A command prefix that enters the namespace `name`. It is not `ip netns exec`, which
        mounts another /sys and so hides the control groups."""
        return ("nsenter", f"--net={self._folder / name}")

    def up(self) -> None:
        at, link = self._addresses, f"{self._addresses.name}-host"
        self._folder.mkdir(parents=True)
        # A killed run with another cache may have left this link. The slot's holder owns its name.
        subprocess.run(["ip", "link", "delete", link], capture_output=True)
        for destination in at.ranges():
            run("ip", "route", "add", "blackhole", destination, *_LAST)
        self._new_namespace(CORE)
        peer = ("peer", "name", "host", "netns", str(self._folder / CORE))
        run("ip", "link", "add", link, "type", "veth", *peer)
        run("ip", "address", "add", f"{at.host}/30", "dev", link)
        run("ip", "link", "set", link, "up")
        self._ip(CORE, "address", "add", f"{at.core_to_host}/30", "dev", "host")
        self._ip(CORE, "link", "set", "host", "up")
        self._ip(CORE, "link", "add", "nodes", "type", "bridge")
        self._ip(CORE, "address", "add", f"{at.core}/24", "dev", "nodes")
        self._ip(CORE, "link", "set", "nodes", "up")
        # Connections to services need a route before kube-proxy can redirect them to a pod.
        self._ip(CORE, "route", "add", at.services, "dev", "nodes")
        for destination in at.ranges():
            run("ip", "route", "add", destination, "via", at.core_to_host)

    def add_node(self, name: str, index: int) -> None:
        at = self._addresses
        self._new_namespace(name)
        peer = ("peer", "name", name, "netns", str(self._folder / CORE))
        self._ip(name, "link", "add", "eth0", "type", "veth", *peer)
        self._ip(CORE, "link", "set", name, "master", "nodes", "up")
        self._ip(name, "address", "add", f"{at.node(index)}/24", "dev", "eth0")
        self._ip(name, "link", "set", "eth0", "up")
        for destination in (at.pods, at.links):
            self._ip(name, "route", "add", destination, "via", at.core)
        self._ip(name, "route", "add", at.services, "dev", "eth0")
        self._ip(CORE, "route", "replace", at.node_pods(index), "via", at.node(index))

    def remove_node(self, name: str) -> None:
        """Remove a node's namespace, links, rules and bridge. Its processes must be dead."""
        run("umount", str(self._folder / name))
        (self._folder / name).unlink()

    def down(self) -> None:
        """Remove all namespaces and routes of this slot, blackhole routes last."""
        for mount in self.mounts():
            run("umount", mount)
        deadline = time.monotonic() + REMOVE_S
        # The kernel removes a namespace's links and their routes a moment after the namespace.
        while routes := self.routes():
            for route in routes:
                subprocess.run(["ip", "route", "delete", *route.split()], capture_output=True)
            assert time.monotonic() < deadline, f"routes stay: {routes}"

    def mounts(self) -> list[str]:
        """The mount points of this slot's namespaces."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        paths = [line.split()[1] for line in lines]
        return [path for path in paths if Path(path).is_relative_to(self._folder)]

    def routes(self) -> list[str]:
        """This machine's routes to this slot, blackhole routes last."""
        listed = []
        for destination in self._addresses.ranges():
            listed += run("ip", "route", "show", "root", destination).splitlines()
        cleaned = [route.removesuffix("linkdown").strip() for route in listed]
        return sorted(cleaned, key=lambda route: route.startswith("blackhole"))

    def _ip(self, namespace: str, *args: str) -> None:
        run(*self.enter(namespace), "ip", *args)

    def _new_namespace(self, name: str) -> None:
        (self._folder / name).touch()
        run("unshare", f"--net={self._folder / name}", "true")
        self._ip(name, "link", "set", "lo", "up")
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        run(*self.enter(name), "sh", "-c", forward)


def run(*args: str) -> str:
    done = subprocess.run(args, capture_output=True, text=True)
    assert not done.returncode, f"{' '.join(args)}: {done.stderr.strip()}"
    return done.stdout
