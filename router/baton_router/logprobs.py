"""Log-probabilities in the endpoints' different shapes.

In: PositionLogprobs as nodes send them (natural log, texts filled). Out: JSON values. JSON has no
minus infinity; -9999 stands for it, as in vLLM. Nothing comes before a prompt's first token, so it
has no probability: its place holds null.
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
    positions: Sequence[PositionLogprobs], top: int, offset: int, first: str | None = None
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion. `offset` counts the characters of the choice's tokens
    before these; the sampled token is always among `top_logprobs`. `first` is the text of a
    prompt's first token, where the positions are those behind it."""
    alone = [] if first is None else [first]
    texts = [*alone, *(position.sampled.text for position in positions)]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    unknown = [None for _ in alone]
    return {
        "tokens": texts,
        "token_logprobs": [*unknown, *(_value(position.sampled) for position in positions)],
        "top_logprobs": [
            *unknown,
            *(
                {token.text: _value(token) for token in (*position.top[:top], position.sampled)}
                for position in positions
            ),
        ],
        "text_offset": offsets,
    }


def prompt_logprobs(positions: Sequence[PositionLogprobs], top: int) -> list[Any]:
    """vLLM's `prompt_logprobs`: per token of the prompt, the token itself and the `top` likeliest
    by id; `positions` begin at the second."""
    return [
        None,
        *(
            {str(token.id): _ranked(token) for token in (position.sampled, *position.top[:top])}
            for position in positions
        ),
    ]


def _ranked(token: TokenLogprob) -> dict[str, Any]:
    return {"logprob": _value(token), "rank": token.rank, "decoded_token": token.text}
