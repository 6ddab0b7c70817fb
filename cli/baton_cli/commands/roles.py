"""`baton prefill`, `baton decode` and `baton router`: each runs one role in this process.

In: a record of flags. Out: the role's settings, and its serve() until SIGTERM. Each function
imports only its own role's package: a router's image needs no engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_cli.commands.role_settings import node_settings, router_settings
from baton_cli.errors import CommandError, UsageError
from baton_cli.logs import configure
from baton_cli.options.environment import for_children
from baton_cli.options.flag import to_argv, to_variables
from baton_cli.options.records import ChildOptions, NodeOptions, RouterOptions
from baton_cli.otlp import export_spans
from baton_node.errors import EngineLost, SetupError
from baton_node.ipc.parent_death import die_with
from baton_node.settings import NodeSettings

if TYPE_CHECKING:
    from baton_protocol.store import Role
    from baton_protocol.traces import Sink
    from baton_router.server.workers import WorkerPool

# The main of a node's engine process. A name, not an import: a server process loads no engine.
ENGINE_MODULE = "baton_cli.engine_process"


def prefill(options: NodeOptions) -> int:
    from baton_prefill_node.serve import serve

    _begin(options)
    settings = _checked_settings(options, "prefill")
    with _spans(options, settings.node) as spans:
        return _run_node(serve(settings, ENGINE_MODULE, spans))


def decode(options: NodeOptions) -> int:
    from baton_decode_node.serve import serve

    _begin(options)
    settings = _checked_settings(options, "decode")
    with _spans(options, settings.node) as spans:
        return _run_node(serve(settings, ENGINE_MODULE, spans))


def router(options: RouterOptions) -> int:
    from baton_protocol.errors import InvalidRequest
    from baton_router import serve
    from baton_router.admission.tenant_limits import read_limits
    from baton_router.auth import Tenants
    from baton_router.errors import ListenError, StartError
    from baton_router.server.workers import serve_workers

    _begin(options, worker=Path(options.worker_socket).stem)
    settings = router_settings(options)
    try:
        settings.check()
        if options.workers > 1:
            # Before any worker starts: otherwise each would report a wrong file in its own log.
            Tenants.of_settings(settings)
            read_limits(settings.tenants)
            asyncio.run(serve_workers(worker_pool(options)))
        else:
            with _spans(options, f"router-{os.getpid()}") as spans:
                asyncio.run(serve(settings, spans=spans))
    except InvalidRequest as error:
        raise UsageError(str(error)) from error
    except ListenError as error:
        raise CommandError(f"router: {error}") from error
    except StartError as error:
        raise UsageError(f"router: {error}") from error
    except OSError as error:
        raise CommandError(f"router: {error}") from error
    return 0


def _checked_settings(options: NodeOptions, role: Role) -> NodeSettings:
    """Raise UsageError: whatever is wrong with a flag, a restart does not help."""
    try:
        return node_settings(options, role)
    except CommandError as error:
        raise UsageError(str(error)) from error


def worker_pool(options: RouterOptions) -> WorkerPool:
    """The workers of `baton router --workers N`: each runs the same command without --workers."""
    from baton_router.server.workers import WorkerPool

    def command(path: Path, port: int) -> list[str]:
        settings = replace(
            options, workers=1, port=port, worker_socket=str(path), supervisor_pid=os.getpid()
        )
        return [sys.executable, "-m", "baton_cli", "router", *to_argv(settings)]

    return WorkerPool(
        pool=options.pool,
        host=options.host,
        port=options.port,
        workers=options.workers,
        command=command,
        environment=for_children(os.environ) | to_variables(options),
    )


def _spans(
    options: NodeOptions | RouterOptions, instance: str
) -> AbstractContextManager[Sink | None]:
    service = "baton-router" if isinstance(options, RouterOptions) else "baton-node"
    return export_spans(options.otlp_endpoint, os.environ, service, instance)


def _begin(options: ChildOptions, worker: str = "") -> None:
    if options.supervisor_pid:
        die_with(options.supervisor_pid)
    configure(options.log_level, options.json_logs, worker)


def _run_node(serving: Coroutine[Any, Any, None]) -> int:
    try:
        asyncio.run(serving)
    except EngineLost as error:
        raise CommandError(str(error)) from error
    except SetupError as error:
        raise UsageError(str(error)) from error
    return 0
