"""The engine: paged KV blocks, one scheduler without phases, and a runner that computes steps.

In: requests (ids), KV bytes of blocks. Out: tokens, KV bytes of blocks. No network.

    llm         the offline API; `build` makes an engine from a model folder and its settings
    sim         the simulated engine: real blocks and bytes, a timing model, no torch
    core        EngineCore: requests from submission to their last token
    scheduling  which sequences compute how many tokens in a step, and who gives up blocks
    runner      one step of a batch on torch
    models      the decoder and its families; `layers`, `attention`: their parts and kernels
    sampling    from logits to tokens
    weights     reading checkpoints
    kv          block pool with its prefix cache, its tensors, the copy in host memory
    memory      how many bytes an engine takes, and whether they fit
    config      settings of an engine and of its model
    interface   what a node sees of an engine; Protocols of the runner and the KV connector
    progress    how far a long start is
    errors      what an engine raises

`LLM` is imported when it is asked for: a simulated node must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from baton_engine.llm import LLM, GuidedDecodingParams, StructuredOutputsParams

__all__ = ["LLM", "GuidedDecodingParams", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "GuidedDecodingParams", "StructuredOutputsParams"):
        from baton_engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
