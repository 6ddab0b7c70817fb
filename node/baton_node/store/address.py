"""Where a node's store is, and who the node is there."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_protocol.ids import Epoch, Fingerprint, NodeId
from baton_protocol.policies import StoreCare


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """The store's URLs, this node's identity there, and how the node uses it."""

    index_url: str = field(repr=False)  # URLs may hold a password
    data_urls: tuple[str, ...] = field(repr=False)
    pool: str
    node: NodeId
    epoch: Epoch
    fingerprint: Fingerprint
    settings: StoreCare = "apply"
    write_behind_bandwidth: int | None = None  # bytes/s; None: a tenth of the measured link
