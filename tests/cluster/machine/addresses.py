"""The addresses and names of a cluster. Each cluster has a slot, so several can run at once.

    host  10.B.0.1/30 --- 10.B.0.2  core  10.B.1.1/24 --- 10.B.1.11  node-1  10.A.1.1/24 --- pods
                                                      +-- 10.B.1.12  node-2  10.A.2.1/24 --- pods

A, B and C (the range of services) are three consecutive numbers. `core` is the network namespace of
the control plane and DNS; each node has its own. None has a default route.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOTS = 8
_FIRST = 200


@dataclass(frozen=True)
class Addresses:
    slot: int

    def _range(self, part: int) -> str:
        return f"10.{_FIRST + 3 * self.slot + part}"

    @property
    def name(self) -> str:
        """The prefix of all names outside the state folder."""
        return f"baton{self.slot}"

    @property
    def pods(self) -> str:
        return f"{self._range(0)}.0.0/16"

    @property
    def links(self) -> str:
        return f"{self._range(1)}.0.0/16"

    @property
    def services(self) -> str:
        return f"{self._range(2)}.0.0/16"

    def ranges(self) -> tuple[str, ...]:
        return (self.pods, self.links, self.services)

    @property
    def first_service(self) -> str:
        return f"{self._range(2)}.0.1"

    @property
    def host(self) -> str:
        """This machine's address, as pods see it."""
        return f"{self._range(1)}.0.1"

    @property
    def core_to_host(self) -> str:
        return f"{self._range(1)}.0.2"

    @property
    def core(self) -> str:
        """The address of the API server and DNS."""
        return f"{self._range(1)}.1.1"

    def node(self, index: int) -> str:
        return f"{self._range(1)}.1.{10 + index}"

    def node_pods(self, index: int) -> str:
        return f"{self._range(0)}.{index}.0/24"
