"""A request, as its owner (the router) sends it to nodes.

Prompt and outputs are separate fields. So when a request is placed again, its limits, stop strings,
usage and logprobs are those of an undisturbed run.
"""

from __future__ import annotations

import msgspec

from baton_protocol.ids import RequestId
from baton_protocol.pooling import PoolingParams
from baton_protocol.sampling import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request in one attempt.

    `outputs[c]` holds the token ids that choice c already has; `outputs` has `params.n` entries.
    `attempt` grows with each placement, and receivers drop messages of older attempts.

    `time_left` is how many seconds the request may still take when the job is sent; None means no
    limit. The receiver counts them on its own monotonic clock, so the clocks of two machines are
    never compared. Up to protocol version 3 a field `deadline` held Unix seconds instead; it is no
    longer sent or read. If the other side speaks version 3, only the router watches the time, and
    aborts the request.

    `traceparent` (W3C) names the router's span; "" if the request is not traced.
    `continues_prompt` is True if the answer's text continues the prompt's text, as in a completion;
    a chat message starts a new text. `salt` and `adapter` enter the block hashes. The router
    derives the salt from the API key; nothing sets an adapter, as no engine has any. An engine with
    the policy `priority` runs requests with a lower `priority` first. A request with `pooling` gets
    one vector instead of tokens; only nodes whose report says `pooling` run it. `after_loss`: an
    attempt before this one lost its node, so known tokens may be computed again.
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
    priority: int = 0
    pooling: PoolingParams | None = None
    after_loss: bool = False


class TokenLogprob(msgspec.Struct, frozen=True, omit_defaults=True):
    """One candidate token at one position. `rank` 1 is the likeliest token; 0 if not computed. The
    node's server process fills `text` and `raw`, the token's bytes."""

    id: int
    logprob: float
    rank: int = 0
    text: str = ""
    raw: bytes = b""


class PositionLogprobs(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampled token and the likeliest tokens, likeliest first. `named` are the tokens of the
    request's `logprob_token_ids`, in their order and without ranks. Log-probabilities are natural
    logarithms, computed before temperature."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    named: tuple[TokenLogprob, ...] = ()
