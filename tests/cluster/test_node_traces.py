"""A cluster of our own leaves nothing behind, even if the run before it was killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.machine.builds import build_small
from tests.cluster.machine.cluster import Cluster
from tests.cluster.machine.disk import node_disk
from tests.cluster.machine.network import run
from tests.cluster.machine.node_files import KERNEL_SETTINGS
from tests.cluster.machine.processes import marked
from tests.cluster.machine.programs import print_progress
from tests.cluster.machine.sweep import Slot, free_slot
from tests.support.needs import needs

BOOT_AND_WAIT = """
import sys, time
from pathlib import Path
from tests.cluster.machine.addresses import Addresses
from tests.cluster.machine.cluster import Cluster
from tests.cluster.machine.sweep import Slot
slot = Slot(Addresses(int(sys.argv[3])), Path(sys.argv[4]))
with Cluster(Path(sys.argv[1]), Path(sys.argv[2]), slot):
    print("up", flush=True)
    time.sleep(600)
"""
# Folders to which containerd, kubelet and the network plugins write unless mounts cover them.
FIXED_PLACES = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/run/containerd")
DEATH_S = 120.0


def settings() -> list[str]:
    kernel = [Path("/proc/sys", name).read_text() for name in KERNEL_SETTINGS]
    return [*kernel, *(place for place in FIXED_PLACES if Path(place).exists())]


def traces(slot: Slot) -> list[str]:
    """Lines with the slot's names among this machine's routes, links, processes and mounts."""
    lines = [
        *run("ip", "route", "show", "table", "all").splitlines(),
        *run("ip", "link", "show").splitlines(),
        *run("ps", "-eo", "pid,args").splitlines(),
        *Path("/proc/self/mountinfo").read_text().splitlines(),
    ]
    networks = [block.removesuffix("0.0/16") for block in slot.addresses.ranges()]
    names = (f"{slot.addresses.name}-", f"{slot.state}/", *networks)
    return [line for line in lines if any(name in line for name in names)]


def boot_and_kill(programs: Path, disk: Path, slot: Slot) -> None:
    """Boot a cluster in another process, and kill that process once the cluster is up."""
    args = [str(programs), str(disk), str(slot.addresses.slot), str(slot.state)]
    command = [sys.executable, "-c", BOOT_AND_WAIT, *args]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.kill()


def test_the_run_after_a_killed_one_works_and_leaves_nothing_behind(programs: Path) -> None:
    needs("own_cluster", "cluster")
    disk = node_disk(programs, build_small(print_progress), print_progress)
    with free_slot() as slot:
        before = settings()
        assert traces(slot) == []
        boot_and_kill(programs, disk, slot)
        deadline = time.monotonic() + DEATH_S
        while marked(str(slot.state)):
            assert time.monotonic() < deadline, "processes outlive the run that started them"
            time.sleep(0.1)
        kinds = {line.split()[0] for line in slot.leftovers()}
        assert kinds >= {"mount", "route", "control", "folder"}
        with Cluster(programs, disk, slot) as again:
            assert again.nodes == ["node-1", "node-2"]
        assert slot.leftovers() == []
        assert traces(slot) == []
        assert settings() == before
