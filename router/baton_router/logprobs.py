"""Log-probabilities in the two endpoints' different shapes.

In: PositionLogprobs as nodes send them (natural log, texts filled). Out: JSON values. JSON has no
minus infinity; -9999 stands for it, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton_protocol.request import PositionLogprobs, TokenLogprob

FLOOR = -9999.0


def _value(token: TokenLogprob) -> float:
    return max(token.logprob, FLOOR)


def _chat_token(token: TokenLogprob) -> dict[str, Any]:
    raw = token.raw or token.text.encode()
    return {"token": token.text, "logprob": _value(token), "bytes": list(raw)}


def chat_logprobs(positions: Sequence[PositionLogprobs], top: int) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion, with `top` alternatives per position."""
    content = [
        _chat_token(position.sampled)
        | {"top_logprobs": [_chat_token(token) for token in position.top[:top]]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    positions: Sequence[PositionLogprobs], top: int, offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `offset` counts the characters of the choice's tokens
    before these; the sampled token is always among `top_logprobs`."""
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(position.sampled.text)
    return {
        "tokens": [position.sampled.text for position in positions],
        "token_logprobs": [_value(position.sampled) for position in positions],
        "top_logprobs": [
            {token.text: _value(token) for token in (*position.top[:top], position.sampled)}
            for position in positions
        ],
        "text_offset": offsets,
    }


def text_length(positions: Sequence[PositionLogprobs]) -> int:
    """Characters of the sampled tokens, for the next `offset`."""
    return sum(len(position.sampled.text) for position in positions)
