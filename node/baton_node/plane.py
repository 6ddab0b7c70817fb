"""What a node's step loop asks of its data plane beside moving chunks (api.KVConnector).

Implemented by connector (over a store) and nostore.
"""

from __future__ import annotations

from typing import Protocol

from baton_engine.api import KVConnector
from baton_protocol.store import DataInstance, StoreHealth


class Measured(Protocol):
    """A data plane that watches itself."""

    def rates(self) -> tuple[float, float]:
        """Put and get, bytes per second, all instances together; 0.0 is not measured."""
        ...

    def instances(self) -> tuple[DataInstance, ...]:
        """The data servers as they are now: rates, latency, fill. Cheap."""
        ...

    def take_behind(self, size: int) -> bool:
        """Whether `size` bytes may be written behind now; True counts them as written. False while
        their bandwidth is used up, or the store is over half full, or in trouble."""
        ...

    def drain(self, draining: bool) -> None:
        """While this node drains the limit of take_behind() is lifted."""
        ...

    def healthy(self) -> bool:
        """Whether a chunk could be published now: the index and a data instance take what they are
        given. Cheap, and asked at every turn of the loop."""
        ...

    def store_health(self) -> StoreHealth:
        """What routers are told of the store: healthy() in their words, or that there is none."""
        ...


class Connector(KVConnector, Measured, Protocol):
    """All that the step loop needs of it."""
