"""The request as its owner (the router) and every node see it.

Prompt and outputs stay apart, so that limits, stop strings, usage and logprobs of a request placed
again are those of an undisturbed run.
"""

from __future__ import annotations

import msgspec

from baton_protocol.ids import RequestId
from baton_protocol.sampling import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request in one attempt.

    `outputs[c]` holds the ids choice c already has; its length is `params.n`. `attempt` grows with
    each placement; anything about an older attempt is dropped. `time_left` is how many seconds the
    request may still take when the job is sent, None without a limit; the receiver measures them
    with its own monotonic clock, so nobody compares the clocks of two machines. Up to version 3 of
    the protocol a field `deadline` held Unix seconds instead. It is neither sent nor read any more:
    where the other side speaks version 3, only the router measures the time, and aborts.
    `traceparent` (W3C) is of the router's span, "" where the request is not traced.
    `continues_prompt` says that the answer's text goes on where the prompt's text ends, as a
    completion's does; a chat message begins a text of its own.
    `salt` and `adapter` enter the block hashes; both come from the router, never from the client.
    """

    id: RequestId
    attempt: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    outputs: tuple[tuple[int, ...], ...]
    time_left: float | None = None
    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    traceparent: str = ""
    continues_prompt: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One candidate at one position. The node's server fills `text` and `raw`."""

    id: int
    logprob: float
    rank: int = 0
    text: str = ""
    raw: bytes = b""


class PositionLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampled token and the likeliest ones, best first. Natural log, before temperature."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
