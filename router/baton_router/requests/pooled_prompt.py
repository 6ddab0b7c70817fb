"""The token ids of a prompt that gets a vector: one text, or two that the tokenizer joins.

In: a prompt of a pooling call. Out: its ids, and where the second text begins. Models read the
vector at the tokenizer's own tokens, such as an EOS at the end, so truncation cuts the text and
keeps those. Of two texts, it cuts the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton_protocol.errors import InvalidRequest, PromptTooLong
from baton_router.nodes.model_offers import Serving
from baton_router.openai.call import Prompt, TextPrompt, Truncation


async def pooled_ids(
    prompt: Prompt, serving: Serving, truncation: Truncation | None, field: str
) -> tuple[Sequence[int], int]:
    """The ids, and the value of PoolingParams.second_text. Raise TextTooLong, PromptTooLong,
    InvalidRequest. `field` is the prompt's name in errors."""
    most = serving.max_model_len
    asked = None if truncation is None or truncation.tokens is None else truncation.tokens
    if asked is not None and asked < most:
        most = asked
    elif asked is not None and asked > most:
        truncation = None  # what is cut to that may still not fit, so it is an error as ever
    if not isinstance(prompt, TextPrompt):
        return _kept(prompt, most, truncation, serving, field), 0
    before, between, after = _special_tokens(prompt, serving)
    room = most - len(before) - len(between) - len(after)
    if truncation is not None and room < 1:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {most}, but the tokenizer adds {most - room} tokens of its"
            " own; keep at least one more, or set add_special_tokens to false",
            param="truncate_prompt_tokens",
        )
    if prompt.pair is None:
        text = await _encoded(prompt.text, room, truncation, serving, field)
        return [*before, *text, *after], 0
    first = await _encoded(prompt.text, room, None, serving, field)
    if truncation is not None and len(first) == room:
        reason = f"leaves none of {most} for the text beside it"
        raise _too_long(serving, reason, field)
    second = await _encoded(prompt.pair, room - len(first), truncation, serving, field)
    return serving.model.tokenizer.join_pair(first, second, prompt.add_special_tokens)


def _special_tokens(
    prompt: TextPrompt, serving: Serving
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The ids before, between and after the texts."""
    tokenizer = serving.model.tokenizer
    if not prompt.add_special_tokens:
        return (), (), ()
    if prompt.pair is not None:
        return tokenizer.around_pair
    before, after = tokenizer.around
    return before, (), after


async def _encoded(
    text: str, most: int, truncation: Truncation | None, serving: Serving, field: str
) -> Sequence[int]:
    """At most `most` ids of a text, without special tokens."""
    longest = serving.model.tokenizer.longest_token
    if truncation is None and len(text) > most * longest:
        reason = f"has {len(text)} characters, at {longest} characters per token at most"
        raise _too_long(serving, reason, field)
    if truncation is not None and truncation.keeps_last and most > 0:
        ids = await serving.model.encode_last(text, most, add_special_tokens=False)
    else:
        ids, _ = await serving.model.encode(text, max(0, most), add_special_tokens=False)
    return _kept(ids, most, truncation, serving, field)


def _kept(
    ids: Sequence[int], most: int, truncation: Truncation | None, serving: Serving, field: str
) -> Sequence[int]:
    if len(ids) <= most:
        return ids
    if truncation is None:
        raise _too_long(serving, f"has more than {serving.max_model_len}", field)
    return ids[len(ids) - max(0, most) :] if truncation.keeps_last else ids[: max(0, most)]


def _too_long(serving: Serving, reason: str, field: str) -> PromptTooLong:
    return PromptTooLong(
        f"a text for this model may have {serving.max_model_len} tokens, but this one {reason}."
        f" Shorten {field}, or set truncate_prompt_tokens",
        param=field,
    )
