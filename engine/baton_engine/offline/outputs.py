"""What a caller of the offline API gets, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baton_protocol.errors import BatonError
from baton_protocol.request import PositionLogprobs
from baton_protocol.sampling import FinishReason

# "abort": the caller ended the request.
EndReason = FinishReason | Literal["abort"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `finish_reason` is None while it runs. `stop_reason` is the stop string or stop
    id that ended it, None for EOS. `cumulative_logprob` counts all tokens so far, those of earlier
    outputs too; it is None without `logprobs`."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: EndReason | None
    stop_reason: str | int | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """When a request's events happened, in seconds; 0.0 if not yet. `arrival_time` is Unix time,
    the others are on the monotonic clock. The time in the queue is `scheduled_ts - queued_ts`; the
    request's last token comes at `last_token_ts`. `first_token_latency` counts from its arrival."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of one prompt, one per choice. Which of them, and whether whole or what is new,
    says the request's `output_kind` (see RequestOutputKind).

    `prompt` is the text, or None for a prompt of token ids. `cached_tokens` is the number of prompt
    tokens from the prefix cache. `prompt_logprobs`, if requested, has one entry per prompt token;
    the first entry is None. `error` is why the engine ended the request without its last token;
    LLM and AsyncLLM raise it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = True
    metrics: RequestStateStats | None = None
    error: BatonError | None = None

    @property
    def num_cached_tokens(self) -> int:
        """vLLM's name for `cached_tokens`."""
        return self.cached_tokens
