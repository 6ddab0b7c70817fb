"""The fields of POST /generative_scoring, with vLLM's names."""

from __future__ import annotations

from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_protocol.sampling import MAX_LOGPROB_IDS
from baton_router.openai.fields.completions import MAX_PROMPTS
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.generation import GenerationFields
from baton_router.openai.fields.kinds import ValueKind, ids, integers, text
from baton_router.openai.fields.table import FieldTable, flag, optional, required
from baton_router.openai.fields.tokens import MAX_IDS
from baton_router.openai.fields.unserved import UnservedFields
from baton_router.tokens.generate_fields import MAX_ID_CHARS

TextOrIds = str | tuple[int, ...]
_IDS = ids(MAX_IDS)
_TEXT_OR_IDS = {"anyOf": [{"type": "string"}, _IDS.schema]}


def _read_query(at: str, value: Any) -> TextOrIds:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or integers(value) is None:
        raise wrong(at, value, "it must be a string or a list of token ids")
    return _IDS.read(at, value)


def _read_items(at: str, value: Any) -> list[TextOrIds]:
    if not isinstance(value, list) or not value:
        raise wrong(
            at, value, "it must be a list of strings or of token id lists, with at least one"
        )
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"{at} holds {len(value)} items; at most {MAX_PROMPTS}", param=at)
    return [_read_query(f"{at}[{place}]", item) for place, item in enumerate(value)]


class ScoringFields(FieldTable, route="/generative_scoring"):
    """A query, items and labels."""

    query = required(
        ValueKind(_read_query, _TEXT_OR_IDS), "what all prompts have: a text, or ids of tokens"
    )
    items = required(
        ValueKind(
            _read_items,
            {"type": "array", "items": _TEXT_OR_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
        ),
        "what each prompt has after the query: texts, or lists of ids",
    )
    label_token_ids = required(
        ids(MAX_LOGPROB_IDS, least=1), "the labels: one token each; the first one is scored"
    )
    apply_softmax = flag(
        True, "a score is the probability among the labels; false: among all tokens"
    )
    item_first = flag(False, "items stand before the query")
    add_special_tokens = flag(True, "add the tokenizer's own tokens (BOS) to a query that is text")
    model = GenerationFields.model
    request_id = optional(text(MAX_ID_CHARS), "the answer's `id` ends with it", "the router's id")
    priority = GenerationFields.priority
    user = UnservedFields.user
    cache_salt = UnservedFields.cache_salt
