"""The forms in which a caller of the offline API gives a prompt.

In: a text, token ids, or a dict with one of them, as vLLM's users write it. Out: GivenPrompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from baton_protocol.errors import InvalidRequest

KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class TextPrompt(TypedDict, total=False):
    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    prompt_token_ids: Sequence[int]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt's text, its ids, or both: then the text is only shown. Prompts of different `salt`
    share no KV in the prefix cache."""

    text: str | None
    ids: tuple[int, ...] | None = None
    salt: str = ""

    @classmethod
    def of(cls, prompt: Prompt) -> GivenPrompt:
        """Raises InvalidRequest."""
        if isinstance(prompt, str):
            return cls(prompt)
        if not isinstance(prompt, Mapping):
            return cls(None, tuple(int(id) for id in prompt))
        for key, value in prompt.items():
            if key not in KEYS and value is not None:
                raise InvalidRequest(
                    f"the prompt holds {key!r}; it may hold {', '.join(KEYS)}", param="prompt"
                )
        values: Mapping[str, Any] = prompt
        text, ids = values.get("prompt"), values.get("prompt_token_ids")
        if text is None and ids is None:
            raise InvalidRequest(
                "the prompt holds neither 'prompt' nor 'prompt_token_ids'", param="prompt"
            )
        return cls(
            text,
            None if ids is None else tuple(int(id) for id in ids),
            values.get("cache_salt") or "",
        )


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
