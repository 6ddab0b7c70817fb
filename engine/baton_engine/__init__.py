"""The engine: paged KV blocks, one scheduler without phases, and a runner that computes steps.

In: requests (ids), KV bytes of blocks. Out: tokens, KV bytes of blocks. No network.

    llm         the offline API, and `beam_outputs` of its beam search
    build       makes an engine from a model folder and its settings
    sim         the simulated engine: real blocks and bytes, a timing model, no torch
    core        EngineCore: requests from submission to their last token
    scheduling  choose the sequences of a step, the tokens each computes, and which to preempt
    runner      one step of a batch on torch
    models      the decoder and its families; `layers`, `attention`: their parts and kernels
    sampling    from logits to tokens
    weights     reading checkpoints
    kv          block pool with its prefix cache, its tensors, and the host tier
    memory      estimate of an engine's memory, and whether it fits
    config      settings of an engine and of its model
    interface   Protocols and records between an engine, its runner and a node
    progress    progress line of a long start
    errors      errors that are found before an engine runs

`LLM` is imported on first access, because a simulated node must not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton_protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from baton_engine.beam_outputs import BeamSearchParams
    from baton_engine.llm import LLM, GuidedDecodingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "BeamSearchParams",
    "GuidedDecodingParams",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from baton_engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
