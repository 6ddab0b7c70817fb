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
from collections.abc import Coroutine
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton_cli.errors import CommandError, UsageError
from baton_cli.local_pool.store import logged_in
from baton_cli.logs import configure
from baton_cli.models.local_folder import find_model
from baton_cli.options.records import ChildOptions, EngineOptions, NodeOptions, RouterOptions
from baton_cli.otlp import exporting
from baton_protocol.figures import NAME
from baton_protocol.parent_death import die_with

if TYPE_CHECKING:
    from baton_node.settings import NodeSettings
    from baton_protocol.store import Role
    from baton_protocol.traces import Sink
    from baton_router.settings import RouterSettings

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
    from baton_router.errors import ListenError, StartError

    _begin(options)
    settings = router_settings(options)
    try:
        settings.check()
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
    from baton_node.settings import NodeSettings

    check_parsers(options)
    index_url, *data_urls = logged_in(options, options.redis_index, *options.redis_data)
    folder, name = "", str(options.engine)
    if options.model or options.engine == "torch":
        found = find_model(options.model, weights=options.engine == "torch")
        folder, name = str(found.path), found.name
    return NodeSettings(
        node=check_name(options.node) or new_name(role),
        role=role,
        host=options.host,
        port=options.port,
        address=options.address,
        pool=options.pool,
        revision=options.revision,
        index_url=index_url,
        data_urls=tuple(data_urls),
        store_settings=options.store_settings,
        fetch=options.fetch,
        write_behind_bandwidth=options.write_behind_bandwidth,
        link_token=check_token(options.link_token),
        engine=options.engine,
        model=folder,
        served_name=options.served_model_name or name,
        **options.engine_options(),
        sim=options.sim,
        chat_template=check_template(options.chat_template),
        tool_parser=options.tool_parser,
        reasoning_parser=options.reasoning_parser,
        start_wait_s=options.start_timeout,
        link_grace_s=options.link_grace,
        drain_s=options.drain_timeout,
        log_level=options.log_level.upper(),
        json_logs=options.json_logs,
    )


def new_name(role: Role) -> str:
    """A unique node name. The digits are random, because containers often share process ids and
    host names."""
    return f"{socket.gethostname()}-{role}-{secrets.token_hex(4)}"


def router_settings(options: RouterOptions) -> RouterSettings:
    from baton_router.settings import RouterSettings

    return RouterSettings(
        host=options.host,
        port=options.port,
        pool=options.pool,
        index_url=logged_in(options, options.redis_index)[0] or None,
        nodes=options.nodes,
        link_token=check_token(options.link_token),
        served_model_name=options.served_model_name or None,
        api_keys=options.api_keys,
        tenants=options.tenants,
        admin_key=options.admin_key,
        sharing=options.sharing,
        tenant_secret=options.tenant_secret,
        handoff=options.handoff,
        handoff_min_tokens=options.handoff_min_tokens,
        placement=options.placement,
        allow_policy_header=options.allow_policy_header,
        missing_role=options.missing_role,
        unready_wait_s=options.unready_wait,
        wake_wait_s=options.wake_wait,
        request_timeout_s=options.request_timeout,
        admission_queue_ms=options.admission_queue_ms,
        max_inflight=options.max_inflight,
        max_queued=options.max_queued,
        queue_timeout_s=options.queue_timeout,
        max_call_sequences=options.max_call_sequences,
        stall_timeout_s=options.stall_timeout,
        link_patience_s=options.link_patience,
        max_body_bytes=options.max_body,
        max_bodies_bytes=options.max_bodies,
        header_timeout_s=options.header_timeout,
        body_timeout_s=options.body_timeout,
        body_bytes_per_s=options.body_rate,
        idle_timeout_s=options.idle_timeout,
        keepalive_s=options.keepalive,
        expect_nodes=options.expect_nodes,
        allowed_hosts=options.allowed_hosts,
        cors_origins=options.cors_origins,
        explain_requests=options.explain_requests,
        shutdown_deadline_s=options.drain_timeout,
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


def check_template(path: str) -> str | None:
    """Return --chat-template as an absolute path, None if empty; raise CommandError if there is no
    such file."""
    if not path:
        return None
    file = Path(path).expanduser()
    if not file.is_file():
        raise CommandError(f"--chat-template {path}: the file does not exist")
    return str(file.resolve())


def check_parsers(options: EngineOptions) -> None:
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


def _begin(options: ChildOptions) -> None:
    if options.supervisor_pid:
        die_with(options.supervisor_pid)
    configure(options.log_level, options.json_logs)


def _run_node(serving: Coroutine[Any, Any, None]) -> int:
    from baton_node.settings import EngineLost, SetupError

    try:
        asyncio.run(serving)
    except EngineLost as error:
        raise CommandError(str(error)) from error
    except SetupError as error:
        raise UsageError(str(error)) from error
    return 0
