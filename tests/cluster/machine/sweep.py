"""Places for clusters on this machine, and how each is left as if it had never been used.

In: a slot's number. Out: its addresses, its folder, all that there is of it (also of a run that was
killed), and that all removed.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.machine.addresses import SLOTS, Addresses
from tests.cluster.machine.cache import cache_folder
from tests.cluster.machine.cgroups import groups, members, remove_groups
from tests.cluster.machine.network import Network
from tests.cluster.machine.processes import kill_all, marked


@dataclass(frozen=True)
class Slot:
    """One of the places for a cluster on this machine."""

    addresses: Addresses
    state: Path

    @property
    def network(self) -> Network:
        return Network(self.addresses, self.state / "network")

    def sweep(self) -> None:
        """Afterwards the slot is as if it had never been used."""
        kill_all([*marked(str(self.state)), *members(self.addresses.name)])
        self.network.down()
        remove_groups(self.addresses.name)
        shutil.rmtree(self.state, ignore_errors=True)

    def leftovers(self) -> list[str]:
        """All that there is of this slot, in words."""
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
    """A slot that no other run has; the kernel gives its lock back if we are killed."""
    folder = cache_folder() / "slots"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(SLOTS):
        with open(folder / f"{number}.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield Slot(Addresses(number), folder / str(number))
            return
    raise RuntimeError(f"all {SLOTS} slots of {folder} are in use by other test runs")
