"""The OpenAI gateway of a pool: it owns each request from its first byte to its last token.

In: HTTP of clients, links to nodes, the registry and markers of the index. Out: answers, jobs.
It mounts no model: tokenizer and chat template come from its nodes, by digest. No torch, no engine.

    settings, errors               what it is told at start; what it raises
    service, workers               life cycle of one router; of several on one port
    app, api, http_server          routes and errors; handlers; what is no request
    answer, events, outbox         JSON and SSE; tokens on their way to the client
    read_guard                     clients that read too slowly
    pages                          what pages in a browser may do
    access                         what became of an HTTP request: its header, its log line
    tenants, limits, reload        API keys and whose they are; what each may; files that change
    admission, queueing, room      whose turn it is; fair order; whether nodes have room
    budgets                        requests and tokens per minute, shared over the index
    waking                         calls that wait for a pool's first node
    bodies, large_json             bounds of time and memory for bodies; decoding large ones
    request_fields                 every field of a body: what is done about it, and why
    fields, parameters, unserved   reading bodies; sampling fields; what is refused or read past
    calls                          what both endpoints share
    openai_chat, openai_completions, completion_shape, logprobs   their fields and shapes
    openapi, openapi_fields, openapi_answers   GET /openapi.json
    field_docs                     the table of fields in docs/api.md
    prepare, models                tokenize and hash once; artifacts by digest
    placement, prices, roster      where a request runs: pure, predicted milliseconds; their figures
    ownership, actions             one request's state machine: pure, no sockets
    dispatch, flights, places      carrying requests from attempt to attempt; placing and booking
    story                          what happens to a request, as it happens
    explain, explanations          GET /requests/{id}; the last ones that ended
    tracing                        spans of calls and placements
    fleet, view, node_view         nodes as one thing; what is believed of them
    chunks, hearing                which node holds which chunk; how that is heard
    links, discovery, markers      one WebSocket per node; finding nodes; what the store holds
    demand, reporting              what clients ask, for who decides how many nodes there are
    siblings, gathered             the workers beside this one; one page out of all of theirs
    metrics, admission_metrics, histograms, pool_json   /metrics, /pool
    readiness, drains              /ready; draining a node
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
