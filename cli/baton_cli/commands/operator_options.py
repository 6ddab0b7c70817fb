"""Flags of `baton operator`: the namespaces it watches, and the images of its pods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_cli.options.records import CommonOptions
from baton_operator.names import OPERATOR
from baton_protocol.options import MAX_PORT, option

PullPolicy = Literal["Always", "IfNotPresent", "Never"]


@dataclass(frozen=True, kw_only=True)
class OperatorOptions(CommonOptions):
    TITLE = "operator"

    namespace: tuple[str, ...] = option(
        (), "namespaces whose pools the operator serves (default: all)", metavar="NAME,..."
    )
    name: str = option(
        OPERATOR,
        "name of this installation in its namespace, the same for all its replicas",
        metavar="NAME",
    )
    node_image: str = option("", "image of prefill and decode nodes", metavar="IMAGE")
    sim_image: str = option(
        "", "image of nodes with the simulated engine (default: --node-image)", metavar="IMAGE"
    )
    router_image: str = option("", "image of routers", metavar="IMAGE")
    redis_image: str = option("", "image with redis-server 7 or later", metavar="IMAGE")
    pull_policy: PullPolicy | None = option(
        None, "pull policy of these images (default: Kubernetes decides by their tags)"
    )
    pull_secrets: tuple[str, ...] = option(
        (), "Secrets with registry logins, in the pools' namespaces", metavar="NAME,..."
    )
    index_networks: tuple[str, ...] = option(
        (),
        "networks in which the operator connects to external indexes"
        " (default: all except loopback, link-local and metadata addresses)",
        metavar="CIDR,...",
    )
    leader_elect: bool = option(False, "act only while holding the lease; for several replicas")
    workers: int = option(4, "number of pools reconciled at a time", least=1)
    host: str = option("127.0.0.1", "address to listen on")
    health_port: int = option(8080, "port of /healthz; 0: none", least=0, most=MAX_PORT)
    metrics_port: int = option(8081, "port of /metrics; 0: none", least=0, most=MAX_PORT)
