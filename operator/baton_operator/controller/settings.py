"""Settings of the operator process."""

from __future__ import annotations

import msgspec

from baton_operator.api.pool import Installation
from baton_operator.kube.egress import Network
from baton_operator.names import OPERATOR


class OperatorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`namespaces`: those to serve; empty for all. `identity`: this replica's name. `name`: the
    installation's, which all its replicas and restarts share. `leader_elect`: whether there are
    other replicas. `index_networks`: networks of external indexes (see `egress`). A port of 0 is
    not opened."""

    installation: Installation
    namespaces: tuple[str, ...] = ()
    identity: str
    name: str = OPERATOR
    leader_elect: bool = False
    index_networks: tuple[Network, ...] = ()
    workers: int = 4
    host: str = "127.0.0.1"
    health_port: int = 0
    metrics_port: int = 0

    @property
    def full_name(self) -> str:
        """The installation's name, unique in the cluster."""
        return "/".join(filter(None, (self.installation.namespace, self.name)))
