"""Fields that the router does not act on: those it refuses by name, and those it reads past.

A field that OpenAI or vLLM knows and that would change the answer is refused unless its value asks
for nothing. One that changes nothing (`user`, `metadata`, `service_tier`, ...) is accepted, under
OpenAI's rules for its value. Names nobody knows are ignored. Whose KV a request may use follows
from its API key: fields that would name it are refused.
"""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import MAX_CHOICES
from baton_router.fields import Fields, wrong

MAX_METADATA = 16

_EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
# Field -> the values that ask for nothing beyond what we do; null always does.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": _EMPTY,
    "tool_choice": ("none", "auto"),
    "functions": _EMPTY,
    "function_call": ("none", "auto"),
    "length_penalty": (1,),
    "suffix": _EMPTY,
    "audio": _EMPTY,
    "modalities": (["text"],),
    "prediction": _EMPTY,
    "reasoning_effort": _EMPTY,
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": _EMPTY,
    "use_beam_search": _EMPTY,
    "truncate_prompt_tokens": (),
    "prompt_embeds": _EMPTY,
    "return_tokens_as_token_ids": _EMPTY,
    "structured_outputs": _EMPTY,
    "guided_json": _EMPTY,
    "guided_regex": _EMPTY,
    "guided_choice": _EMPTY,
    "guided_grammar": _EMPTY,
    "logits_processors": _EMPTY,
    "documents": _EMPTY,
    "chat_template": _EMPTY,
    "continue_final_message": _EMPTY,
}
_DERIVED = ("cache_salt", "salt", "tenant", "adapter", "adapter_digest")
_PLAIN_TEXT = {
    "type": ["object", "null"],
    "properties": {"type": {"const": "text"}},
    "required": ["type"],
}
_METADATA = {"additionalProperties": {"type": "string"}, "maxProperties": MAX_METADATA}


def check_unserved(fields: Fields, *more: str) -> None:
    """Raise InvalidRequest naming the first field that asks for what we do not do, or that breaks
    OpenAI's rules for it. `more` are fields that only the other endpoint obeys."""
    unserved = "this server does not support it; leave it out"
    refused = _REFUSED | dict.fromkeys(more, _EMPTY)
    if fields.given(refused):
        for name, harmless in refused.items():
            _only(fields, name, harmless, unserved)
    format = fields.raw("response_format", _PLAIN_TEXT)
    if format is not None and not (isinstance(format, dict) and format.get("type") == "text"):
        raise wrong("response_format", format, unserved)
    if fields.given(_DERIVED):
        for name in _DERIVED:
            _only(fields, name, _EMPTY, "no request may name it: the API key says it; leave it out")
    n = fields.integer("n", 1, MAX_CHOICES) or 1
    best_of = fields.integer("best_of", 1, MAX_CHOICES)
    fields.rule({"description": "best_of is what n is"})
    if best_of is not None and best_of != n:
        raise wrong("best_of", best_of, f"this server supports n only, which is {n}; leave it out")
    fields.text("user")
    _check_metadata(fields)


def _only(fields: Fields, name: str, harmless: tuple[Any, ...], complaint: str) -> None:
    value = fields.raw(name, {"enum": [None, *harmless]})
    if value is not None and not any(_same(value, one) for one in harmless):
        raise wrong(name, value, complaint)


def _same(value: Any, other: Any) -> bool:
    """As JSON has it: true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _check_metadata(fields: Fields) -> None:
    pairs = fields.mapping("metadata", _METADATA) or {}
    if len(pairs) > MAX_METADATA:
        raise InvalidRequest(
            f"metadata holds {len(pairs)} pairs; at most {MAX_METADATA}", param="metadata"
        )
    for name, value in pairs.items():
        if not isinstance(value, str):
            raise wrong("metadata", {name: value}, "each value must be a string")
