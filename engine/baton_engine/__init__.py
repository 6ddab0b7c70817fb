"""The engine: paged KV blocks, one scheduler without phases, and a runner that computes steps.

In: requests (ids), KV bytes of blocks. Out: tokens, KV bytes of blocks. No network.

    api          what the rest of a node sees of an engine; the Runner's and connector's Protocols
    blocks       the block pool: reference counts, LRU order, prefix cache
    sequence     one choice of one request: tokens known, KV computed
    scheduler    which sequences compute how many tokens in a step, and who gives up blocks
    rows         what the runner is asked; limits: what can run at all; outcome: how a choice ends
    flight       the steps under way; reading: what they brought; roster: who runs, and how it ends
    reservations blocks of requests that do not run yet
    core         EngineCore: api.Engine over a scheduler and any Runner
    sim          the simulated twin: real blocks and bytes, a timing model, no torch
    llm          the offline API

`LLM` is imported when it is asked for: a simulated node must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from baton_engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from baton_engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
