"""`baton prefill`, `baton decode` and `baton router`: each runs one role in this process.

In: a record of flags. Out: the role's settings, and its serve() until SIGTERM. Each function
imports only its own role's package: a router's image needs no engine.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from baton_cli.commands.role_settings import node_settings, router_settings
from baton_cli.errors import CommandError, UsageError
from baton_cli.logs import configure
from baton_cli.options.records import ChildOptions, NodeOptions, RouterOptions
from baton_cli.otlp import export_spans
from baton_node.errors import EngineLost, SetupError
from baton_node.ipc.engine_process import ENGINE_MODULE
from baton_node.settings import NodeSettings
from baton_protocol.event_loop import run
from baton_protocol.parent_death import die_with

if TYPE_CHECKING:
    from baton_protocol.store import Role
    from baton_protocol.traces import Sink


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
    from baton_router.errors import ListenError, StartError

    _begin(options)
    settings = router_settings(options)
    try:
        settings.check()
        with _spans(options, f"router-{os.getpid()}") as spans:
            run(serve(settings, spans=spans))
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


def _spans(
    options: NodeOptions | RouterOptions, instance: str
) -> AbstractContextManager[Sink | None]:
    service = "baton-router" if isinstance(options, RouterOptions) else "baton-node"
    return export_spans(options.otlp_endpoint, os.environ, service, instance)


def _begin(options: ChildOptions) -> None:
    if options.supervisor_pid:
        die_with(options.supervisor_pid)
    configure(options.log_level, options.json_logs)


def _run_node(serving: Coroutine[Any, Any, None]) -> int:
    try:
        run(serving)
    except EngineLost as error:
        raise CommandError(str(error)) from error
    except SetupError as error:
        raise UsageError(str(error)) from error
    return 0
