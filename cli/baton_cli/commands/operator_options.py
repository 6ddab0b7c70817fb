"""Flags of `baton operator`: the namespaces it watches, and the images of its pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_cli.options.flag import flag
from baton_cli.options.records import MAX_PORT, CommonOptions
from baton_operator.names import OPERATOR

PullPolicy = Literal["Always", "IfNotPresent", "Never"]


@dataclass(frozen=True, kw_only=True)
class OperatorOptions(CommonOptions):
    TITLE = "operator"

    namespace: tuple[str, ...] = flag(
        (), "namespaces whose pools the operator serves (default: all)", metavar="NAME,..."
    )
    name: str = flag(
        OPERATOR,
        "name of this installation in its namespace, the same for all its replicas",
        metavar="NAME",
    )
    node_image: str = flag("", "image of prefill and decode nodes", metavar="IMAGE")
    sim_image: str = flag(
        "", "image of nodes with the simulated engine (default: --node-image)", metavar="IMAGE"
    )
    router_image: str = flag("", "image of routers", metavar="IMAGE")
    redis_image: str = flag("", "image with redis-server 7 or later", metavar="IMAGE")
    pull_policy: PullPolicy | None = flag(
        None, "pull policy of these images (default: Kubernetes decides by their tags)"
    )
    pull_secrets: tuple[str, ...] = flag(
        (), "Secrets with registry logins, in the pools' namespaces", metavar="NAME,..."
    )
    index_networks: tuple[str, ...] = flag(
        (),
        "networks in which the operator connects to external indexes"
        " (default: all except loopback, link-local and metadata addresses)",
        metavar="CIDR,...",
    )
    leader_elect: bool = flag(False, "act only while holding the lease; for several replicas")
    workers: int = flag(4, "number of pools reconciled at a time", least=1)
    host: str = flag("127.0.0.1", "address to listen on")
    health_port: int = flag(8080, "port of /healthz; 0: none", least=0, most=MAX_PORT)
    metrics_port: int = flag(8081, "port of /metrics; 0: none", least=0, most=MAX_PORT)
