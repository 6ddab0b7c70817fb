"""The part of a node that prefill and decode nodes share.

In: jobs from routers over the link, chunks from the store. Out: tokens, chunks, load reports.
AsyncLLM, the offline API for asyncio, has an engine process of the same kind, and no server.

A node is two processes: the server process (aiohttp, no torch) and the engine process, where one
thread runs the step loop and other threads transfer KV.

    async_llm  AsyncLLM: requests of this process to an engine process of its own
    server     the server process: routes, links to routers, requests, drain, health, metrics
    engine     the engine process: builds and measures the engine, runs the step loop, reports load;
               defines the Protocols that the two roles' classes implement
    store      the KV connector over baton_kvstore, and one for a node without a store
    ipc        frames between the two processes; makes them end together
    artifacts  the model's tokenizer, config and template files
    settings   a node's settings
    errors     why a node cannot start or go on
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton_node.async_llm import AsyncLLM, AsyncLLMEngine, EngineDeadError

__all__ = ["AsyncLLM", "AsyncLLMEngine", "EngineDeadError"]


def __getattr__(name: str) -> Any:
    """Import AsyncLLM when it is first used: a node has no use for it."""
    if name in __all__:
        from baton_node import async_llm

        return getattr(async_llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
