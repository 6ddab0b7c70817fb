"""Slots for clusters on this machine, and their complete clean-up.

In: a slot's number. Out: its addresses and folder, a list of everything that a run left in it, and
the removal of all that, also after a killed run.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machine.addresses import SLOTS, Addresses
from tests.cluster.machine.cgroups import groups, members, remove_groups
from tests.cluster.machine.network import Network
from tests.cluster.machine.processes import kill_all, marked
from tests.support.project.cache import cache_folder


@dataclass(frozen=True)
class Slot:
    """A slot for one cluster on this machine."""

    addresses: Addresses
    state: Path

    @property
    def network(self) -> Network:
        return Network(self.addresses, self.state / "network")

    def sweep(self) -> None:
        """Remove everything that runs of this slot have left."""
        kill_all([*marked(str(self.state)), *members(self.addresses.name)])
        self.network.down()
        remove_groups(self.addresses.name)
        shutil.rmtree(self.state, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """Descriptions of everything that exists of this slot."""
        processes = {*marked(str(self.state)), *members(self.addresses.name)}
        files = [self.state] if self.state.exists() else []
        return [
            *(f"process {process.pid} {process.name()}" for process in processes),
            *(f"mount {path}" for path in self.network.mounts()),
            *(f"route {route}" for route in self.network.routes()),
            *(f"control group {path}" for path in groups(self.addresses.name)),
            *(f"folder {path}" for path in files),
        ]


@contextmanager
def free_slot() -> Iterator[Slot]:
    """A slot that no other process uses, of any user. Left-overs of killed runs in other free slots
    are removed too."""
    ours: Slot | None = None
    with ExitStack() as held:
        for number in range(SLOTS):
            slot = Slot(Addresses(number), cache_folder() / "slots" / str(number))
            if ours is not None and not slot.state.exists():
                continue
            mark = _claim(slot.addresses.name)
            if mark is None:
                continue
            slot.sweep()
            if ours is None:
                ours = slot
                held.enter_context(mark)
            else:
                mark.close()
        if ours is None:
            raise RuntimeError(f"all {SLOTS} slots for clusters on this machine are in use")
        yield ours


def _claim(name: str) -> socket.socket | None:
    """A socket with an abstract name, which only one process of this machine can hold; None if
    another holds it. The kernel frees the name when this process ends, even by a kill."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0cluster-under-test/{name}")
    except OSError:
        mark.close()
        return None
    return mark
