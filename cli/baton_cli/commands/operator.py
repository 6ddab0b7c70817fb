"""`baton operator`: runs the Kubernetes operator in this process.

In: OperatorOptions. Out: OperatorSettings, and the operator's serve() until SIGTERM. This module is
separate from `roles` so that an operator imports nothing that only nodes and routers need.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from ipaddress import ip_network

from baton_cli.commands.operator_options import OperatorOptions
from baton_cli.errors import CommandError, UsageError
from baton_cli.logs import configure
from baton_operator.api.pool import Images, Installation
from baton_operator.controller.app import serve
from baton_operator.controller.settings import OperatorSettings
from baton_operator.kube.connection import ConnectionFailed
from baton_operator.kube.egress import Network


def run(options: OperatorOptions) -> int:
    settings = settings_of(options, os.environ)
    configure(options.log_level, options.json_logs)
    try:
        asyncio.run(serve(settings))
    except (ConnectionFailed, OSError) as error:
        raise CommandError(f"operator: {error}") from error
    return 0


def settings_of(options: OperatorOptions, environ: Mapping[str, str]) -> OperatorSettings:
    """Convert flags to OperatorSettings; raise UsageError if a required value is missing."""
    required = {name: getattr(options, f"{name}_image") for name in ("node", "router", "redis")}
    for name, image in required.items():
        if not image:
            raise UsageError(f"--{name}-image is missing; name the image of the pools' pods")
    namespace = environ.get("POD_NAMESPACE", "")
    if options.leader_elect and not namespace:
        raise UsageError(
            "--leader-elect needs the variable POD_NAMESPACE, the namespace of the lease"
        )
    return OperatorSettings(
        installation=Installation(
            images=Images(**required, sim=options.sim_image),
            namespace=namespace,
            pull_policy=options.pull_policy or "",
            pull_secrets=options.pull_secrets,
        ),
        namespaces=options.namespace,
        # The pod's name: a container that restarts in its pod keeps holding its lease.
        identity=environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
        name=options.name,
        leader_elect=options.leader_elect,
        index_networks=tuple(_network(text) for text in options.index_networks),
        workers=options.workers,
        host=options.host,
        health_port=options.health_port,
        metrics_port=options.metrics_port,
    )


def _network(text: str) -> Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise UsageError(
            f"--index-networks: {error}; write ADDRESS/BITS, as 10.20.0.0/16"
        ) from error
