"""The OpenAI gateway of a pool: it owns each request from its first byte to its last token.

In: HTTP of clients, links to nodes, the registry and markers of the index. Out: answers, jobs.
It mounts no model: tokenizer and chat template come from its nodes, by digest. No torch, no engine.

    server         the process: composition, workers on one port, files that are read again
    http           routes, event streams; bounds for bodies; what browsers may do
    observability  what became of a request: log line, explanation, trace
    admission      who may start now: limits, fair queues, capacity, cold start
    requests       one request's life: tokenized, placed, carried from attempt to attempt, ended
    metrics        Prometheus page, and the load report for the autoscaler
    openai         OpenAI's API: reading bodies, checking fields, the JSON of answers
    nodes          what is known of nodes: links, loads, cached prefixes, model files
    placement      predicted cost of nodes and pairs, and the choice; pure
    auth           API keys, and whose they are
    settings       what a router is told at its start
    errors         what it raises
"""

from __future__ import annotations

from collections.abc import Callable

from baton_protocol.traces import Sink
from baton_router.settings import RouterSettings

__all__ = ["RouterSettings", "serve"]


async def serve(
    settings: RouterSettings,
    started: Callable[[str, int], None] | None = None,
    spans: Sink | None = None,
) -> None:
    """Run a router until SIGTERM or SIGINT; a second signal ends it at once.

    `started` hears host and port once it listens; `spans` gets what it traces. Raise InvalidRequest
    for settings that make no sense, StartError (an OSError of one line) where it cannot listen.
    """
    from baton_router.server.router import (
        run,  # imported here: the command line reads settings only
    )

    await run(settings, started, spans)
