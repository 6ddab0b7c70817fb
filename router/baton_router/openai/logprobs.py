"""Logprobs in the formats of both endpoints.

In: PositionLogprobs from nodes (natural logarithm, with texts). Out: records of `answers`. JSON has
no minus infinity, so -9999 represents it, as in vLLM. A prompt's first token has no probability,
because nothing precedes it; its entry is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from baton_protocol.request import PositionLogprobs, TokenLogprob
from baton_protocol.sampling import ALL_LOGPROBS, MOST_LOGPROBS
from baton_router.openai.answers import (
    ChatLogprobs,
    ChatPosition,
    ChatToken,
    CompletionLogprobs,
    PromptLogprobs,
    RankedToken,
)

FLOOR = -9999.0


def json_logprob(token: TokenLogprob) -> float:
    """The log-probability as JSON can have it."""
    return max(token.logprob, FLOOR)


def token_name(token: TokenLogprob, as_id: bool = False) -> str:
    """A token's text. Bytes that are not valid UTF-8 alone, such as half a character, become
    `bytes:\\xe2\\x82`. A token without bytes, or any token with `as_id`, becomes `token_id:7`."""
    if as_id or not token.text:
        return f"token_id:{token.id}"
    if "\ufffd" not in token.text:
        return token.text
    try:
        return token.raw.decode()  # the token really is the replacement character
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.raw)


def chat_logprobs(
    positions: Sequence[PositionLogprobs], top: int, as_id: bool = False
) -> ChatLogprobs:
    """`choices[].logprobs` of a chat completion, with `top` alternatives per position."""
    content = [
        ChatPosition(
            token=token_name(position.sampled, as_id),
            logprob=json_logprob(position.sampled),
            bytes=token_bytes(position.sampled),
            top_logprobs=[
                ChatToken(
                    token=token_name(token, as_id),
                    logprob=json_logprob(token),
                    bytes=token_bytes(token),
                )
                for token in candidates(position, top)
            ],
        )
        for position in positions
    ]
    return ChatLogprobs(content=content, refusal=None)


def candidates(position: PositionLogprobs, top: int) -> Sequence[TokenLogprob]:
    """The `top` most likely tokens, then those that the client named and that are not among
    them."""
    likely = position.top[:top]
    if not position.named:
        return likely
    shown = {token.id for token in likely}
    named = {token.id: token for token in position.named if token.id not in shown}
    return (*likely, *named.values())


def token_bytes(token: TokenLogprob) -> list[int]:
    """The token's bytes, or else its text's."""
    return list(token.raw or token.text.encode())


def completion_logprobs(
    positions: Sequence[PositionLogprobs],
    top: int,
    offsets: Sequence[int],
    first: TokenLogprob | None = None,
    as_id: bool = False,
) -> CompletionLogprobs:
    """`choices[].logprobs` of a completion. The sampled token is always in `top_logprobs`. `first`
    is the prompt's first token if the positions start after it. `offsets` are the text offsets of
    all these tokens."""
    alone = [] if first is None else [token_name(first, as_id)]
    unknown = [None for _ in alone]
    return CompletionLogprobs(
        tokens=[*alone, *(token_name(position.sampled, as_id) for position in positions)],
        token_logprobs=[*unknown, *(json_logprob(position.sampled) for position in positions)],
        top_logprobs=[*unknown, *(_by_name(position, top, as_id) for position in positions)],
        text_offset=offsets,
    )


def _by_name(position: PositionLogprobs, top: int, as_id: bool) -> dict[str, float]:
    """The candidates by name. If several ids share a text, the sampled token keeps it, else the
    most likely one; the others are named by id."""
    sampled, by_name = position.sampled, dict[str, float]()
    own = token_name(sampled, as_id)
    for token in candidates(position, top):
        if token.id == sampled.id:
            by_name[own] = json_logprob(sampled)
            continue
        name = token_name(token, as_id)
        if name == own or name in by_name:
            name = token_name(token, as_id=True)
        by_name[name] = json_logprob(token)
    by_name.setdefault(own, json_logprob(sampled))
    return by_name


def prompt_logprobs(positions: Sequence[PositionLogprobs], top: int) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: for each prompt token, the token and the `top` most likely ones by
    id. `positions` start at the second token."""
    return [
        None,
        *(
            {str(token.id): _ranked(token) for token in (position.sampled, *position.top[:top])}
            for position in positions
        ),
    ]


def _ranked(token: TokenLogprob) -> RankedToken:
    return RankedToken(logprob=json_logprob(token), rank=token.rank, decoded_token=token.text)


@overload
def shown_logprobs(requested: int) -> int: ...
@overload
def shown_logprobs(requested: None) -> None: ...
@overload
def shown_logprobs(requested: int | None) -> int | None: ...
def shown_logprobs(requested: int | None) -> int | None:
    """How many likely tokens an answer shows at most, of those that the nodes sent."""
    return MOST_LOGPROBS if requested == ALL_LOGPROBS else requested
