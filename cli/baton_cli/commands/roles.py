"""`baton prefill`, `baton decode` and `baton router`: each runs one role in this process.

In: a record of flags. Out: the role's settings, and its serve() until SIGTERM. Each function
imports only its own role's package: a router's image needs no engine.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import sys
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_cli.errors import CommandError, UsageError
from baton_cli.local_pool.store import logged_in
from baton_cli.logs import configure
from baton_cli.models.local_folder import find_model
from baton_cli.options.environment import for_children
from baton_cli.options.flag import to_argv, to_variables
from baton_cli.options.records import ChildOptions, NodeOptions, RouterOptions
from baton_cli.otlp import exporting
from baton_node.ipc.parent_death import die_with
from baton_node.settings import (
    EngineLost,
    ExchangeSettings,
    ModelSettings,
    NodeSettings,
    ServerSettings,
    SetupError,
)
from baton_protocol.figures import NAME
from baton_protocol.options import values_of
from baton_router.settings import RouterSettings

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


def node_settings(options: NodeOptions, role: Role) -> NodeSettings:
    """Convert flags to NodeSettings; raise CommandError for a wrong flag or a missing model."""
    check_parsers(options)
    index_url, *data_urls = logged_in(options, options.index_url, *options.data_urls)
    folder, name = "", str(options.engine)
    if options.model or options.engine == "torch":
        found = find_model(options.model, weights=options.engine == "torch")
        folder, name = str(found.path), found.name
    derived = {
        "node": check_name(options.node) or new_name(role),
        "index_url": index_url,
        "data_urls": tuple(data_urls),
        "link_token": check_token(options.link_token),
        "model": folder,
        "served_model_name": options.served_model_name or name,
        "chat_template": check_template(options.chat_template),
    }
    given = values_of(options, ServerSettings, ModelSettings, ExchangeSettings)
    return NodeSettings(
        **(given | derived),
        role=role,
        log_level=options.log_level.upper(),
        json_logs=options.json_logs,
    )


def new_name(role: Role) -> str:
    """A unique node name. The digits are random, because containers often share process ids and
    host names."""
    return f"{socket.gethostname()}-{role}-{secrets.token_hex(4)}"


def router_settings(options: RouterOptions) -> RouterSettings:
    """Convert flags to RouterSettings; raise CommandError for a wrong token or login."""
    derived = {
        "index_url": logged_in(options, options.index_url)[0],
        "link_token": check_token(options.link_token),
    }
    return RouterSettings(**(values_of(options, RouterSettings) | derived))


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


def check_name(name: str) -> str:
    """Return --node unchanged, even ""; raise CommandError if routers would refuse the name."""
    if name and re.match(NAME, name) is None:
        raise CommandError(
            f"--node {name!r}: use at most 253 letters, digits and punctuation marks, "
            "without spaces"
        )
    return name


def check_token(token: str) -> str:
    """Return --link-token unchanged; raise CommandError if an HTTP header cannot carry it."""
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise CommandError(
            "--link-token contains a space or another character that no HTTP header can carry;"
            " use letters and digits"
        )
    return token


def check_template(path: str) -> str:
    """Return --chat-template as an absolute path, "" if empty; raise CommandError if there is no
    such file."""
    if not path:
        return ""
    file = Path(path).expanduser()
    if not file.is_file():
        raise CommandError(f"--chat-template {path}: the file does not exist")
    return str(file.resolve())


def check_parsers(options: ModelSettings) -> None:
    """Raise CommandError for an unknown --tool-parser or --reasoning-parser."""
    from baton_text.artifacts import ArtifactError
    from baton_text.parsers.registry import parsers_artifact

    try:
        parsers_artifact(options.tool_parser, options.reasoning_parser)
    except ArtifactError as error:
        raise CommandError(str(error)) from error


def _spans(
    options: NodeOptions | RouterOptions, instance: str
) -> AbstractContextManager[Sink | None]:
    service = "baton-router" if isinstance(options, RouterOptions) else "baton-node"
    return exporting(options.otlp_endpoint, os.environ, service, instance)


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
