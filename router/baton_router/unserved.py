"""Fields that the router does not act on: those it refuses by name, and those it reads past.

A field that OpenAI or vLLM knows and that would change the answer is refused unless its value asks
for nothing. One that changes nothing (`user`, `metadata`, `service_tier`, ...) is accepted, under
OpenAI's rules for its value. Names nobody knows are ignored. Whose KV a request may use follows
from its API key: fields that would name it are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_router.fields import Fields, wrong

MAX_METADATA = 16


def _empty(value: Any) -> bool:
    return value in (None, False, "", [], {})


def _absent(value: Any) -> bool:
    return value is None


def _one(value: Any) -> bool:
    return not isinstance(value, bool) and value == 1


def _plain_text(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") == "text"


# Field -> whether its value asks for nothing beyond what we do.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "tools": _empty,
    "tool_choice": lambda value: value in ("none", "auto"),
    "functions": _empty,
    "function_call": lambda value: value in ("none", "auto"),
    "response_format": _plain_text,
    "length_penalty": _one,
    "suffix": _empty,
    "audio": _empty,
    "modalities": lambda value: value == ["text"],
    "prediction": _empty,
    "reasoning_effort": _empty,
    "verbosity": lambda value: value == "medium",
    "web_search_options": _absent,
    "store": _empty,
    "use_beam_search": _empty,
    "truncate_prompt_tokens": _absent,
    "prompt_embeds": _empty,
    "return_tokens_as_token_ids": _empty,
    "structured_outputs": _empty,
    "guided_json": _empty,
    "guided_regex": _empty,
    "guided_choice": _empty,
    "guided_grammar": _empty,
    "logits_processors": _empty,
    "documents": _empty,
    "chat_template": _empty,
    "continue_final_message": _empty,
}
_DERIVED = ("cache_salt", "salt", "tenant", "adapter", "adapter_digest")


def check_unserved(fields: Fields, *more: str) -> None:
    """Raise InvalidRequest naming the first field that asks for what we do not do, or that breaks
    OpenAI's rules for it. `more` are fields that only the other endpoint obeys."""
    for name, harmless in (_REFUSED | dict.fromkeys(more, _empty)).items():
        value = fields.raw(name)
        if value is not None and not harmless(value):
            raise wrong(name, value, "this server does not support it; leave it out")
    for name in _DERIVED:
        if not _empty(value := fields.raw(name)):
            raise wrong(name, value, "no request may name it: the API key says it; leave it out")
    n, best_of = fields.integer("n") or 1, fields.integer("best_of")
    if best_of is not None and best_of != n:
        raise wrong("best_of", best_of, f"this server supports n only, which is {n}; leave it out")
    fields.text("user")
    _check_metadata(fields)


def _check_metadata(fields: Fields) -> None:
    pairs = fields.mapping("metadata") or {}
    if len(pairs) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata holds {len(pairs)} pairs; at most {MAX_METADATA}", param="metadata"
        )
    for name, value in pairs.items():
        if not isinstance(value, str):
            raise wrong("metadata", {name: value}, "each value must be a string")
