"""The OpenAI gateway of a pool: it owns each request from its first byte to its last token.

In: HTTP requests of clients, links to nodes, the registry and markers of the index. Out: answers,
jobs. It mounts no model: it gets tokenizer and chat template from its nodes, by digest. No torch,
no engine.

    server         the process: composition, life cycle, reloaded files
    http           routes, event streams; bounds for bodies; rules for browsers
    observability  what became of a request: log line, explanation, trace
    admission      which prompts may start now: limits, fair queues, capacity, cold start
    requests       the life of one request: tokenization, placement, attempts, end
    metrics        the Prometheus page, and the load report for the autoscaler
    openai         OpenAI's API: parsing bodies, checking fields, the JSON of answers
    nodes          knowledge of nodes: links, loads, cached prefixes, model files
    placement      predicted cost of nodes and pairs, and the choice; pure
    auth           API keys and their tenants
    settings       the router's settings
    errors         the router's exceptions
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

    `started` is called with host and port once the router listens. `spans` receives its trace
    spans. Raise InvalidRequest for invalid settings, and StartError (an OSError with a one-line
    message) if the router cannot listen.
    """
    from baton_router.server.router import (
        run,  # imported here: the command line reads settings only
    )

    await run(settings, started, spans)
