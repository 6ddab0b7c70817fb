"""The OpenAI gateway of a pool: it owns each request from its first byte to its last token.

In: HTTP of clients, links to nodes, the registry and markers of the index. Out: answers, jobs.
It mounts no model: tokenizer and chat template come from its nodes, by digest. No torch, no engine.

    settings                       what it is told at start
    service, app, api, answer      life cycle; routes and errors; handlers; SSE and JSON
    access                         what became of an HTTP request: its header, its log line
    tenants                        API keys, whose they are, and what keeps tenants' KV apart
    fields, parameters, unserved   reading bodies; sampling fields; what is refused or read past
    calls                          what both endpoints share
    openai_chat, openai_completions, completion_shape, logprobs   their fields and shapes
    prepare, models                tokenize and hash once; artifacts by digest
    placement, prices              where a request runs: pure, predicted milliseconds
    ownership, actions             one request's state machine: pure, no sockets
    dispatch, flights, places      carrying requests from attempt to attempt; placing and booking
    story                          what happens to a request, as it happens
    explain, explanations          GET /requests/{id}; the last ones that ended
    tracing                        spans of calls and placements
    outbox                         tokens on their way to the client
    fleet, view, chunks            nodes as one thing; what is believed of them; who holds what
    links, discovery, markers      one WebSocket per node; finding nodes; what the store holds
    metrics, pool_json, drains     /metrics and /pool; POST /nodes/{node}/drain and /resume
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
    from baton_router.service import run  # imported here: the command line reads settings only

    await run(settings, started, spans)
