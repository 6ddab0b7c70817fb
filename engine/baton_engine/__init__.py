"""The engine: paged KV blocks, one scheduler without phases, and a runner that computes steps.

In: requests (ids), KV bytes of blocks. Out: tokens, KV bytes of blocks. No network, except that a
hub's model is fetched when a caller names one.

    llm         the offline API; it runs its prompts by `llm_engine`
    build       makes an engine from a model folder and its settings
    offline     what the offline API's classes share, also AsyncLLM in the node's room
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
    vectors     from a pooling model's numbers to an answer
    errors      errors that are found before an engine runs

Nothing is imported before its first access: a simulated node must not load torch, which LLM and
LLMEngine need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton_engine.llm import LLM
    from baton_engine.llm_engine import LLMEngine
    from baton_engine.offline.arguments import AsyncEngineArgs, EngineArgs
    from baton_engine.offline.beam_outputs import BeamSearchParams
    from baton_engine.offline.outputs import CompletionOutput, RequestOutput
    from baton_engine.offline.parameters import (
        GuidedDecodingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from baton_engine.offline.pooling import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from baton_engine.offline.prompts import TextPrompt, TokensPrompt
    from baton_protocol.pooling import PoolingParams

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "BeamSearchParams",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LLMEngine",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
_MODULES = {
    "llm": ("LLM",),
    "llm_engine": ("LLMEngine",),
    "offline.arguments": ("AsyncEngineArgs", "EngineArgs"),
    "offline.beam_outputs": ("BeamSearchParams",),
    "offline.outputs": ("CompletionOutput", "RequestOutput"),
    "offline.parameters": (
        *("GuidedDecodingParams", "RequestOutputKind", "SamplingParams"),
        "StructuredOutputsParams",
    ),
    "offline.pooling": (
        *("ClassificationRequestOutput", "EmbeddingRequestOutput", "PoolingParams"),
        *("PoolingRequestOutput", "ScoringRequestOutput"),
    ),
    "offline.prompts": ("TextPrompt", "TokensPrompt"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"baton_engine.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
