"""The fields of the routes that pooling models answer: /v1/embeddings, /score and /rerank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_protocol.errors import InvalidRequest
from baton_router.openai.fields.errors import wrong
from baton_router.openai.fields.generation import AS_FITS, GenerationFields
from baton_router.openai.fields.kinds import Json, Schema, ValueKind, choice, integer, prompts, text
from baton_router.openai.fields.table import (
    FieldTable,
    flag,
    gives,
    optional,
    read_fields,
    refused,
    required,
    rule,
    schema_of,
)
from baton_router.openai.fields.unserved import UnservedFields

MAX_TEXTS = 2048  # of one call, as OpenAI allows
_SEVERAL: Json = {"type": "array", "minItems": 1, "maxItems": MAX_TEXTS}
_GIVEN: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {}}]}
_NULL: Schema = {"type": "null"}
# The names of the two sides of pairs, of which a body has one.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
ONE_OF_EACH = "text_1 and text_2 must be there, or queries and documents, or data_1 and data_2"
LENGTHS_AGREE = "the first side is one text, or has as many as the second"


def _read_texts(at: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(x, str) for x in items):
        raise wrong(at, value, "it must be a string or a list of strings")
    return _at_most(at, items)


def _at_most(at: str, items: list[Any]) -> list[Any]:
    if len(items) > MAX_TEXTS:
        raise InvalidRequest(f"{at} holds {len(items)} texts; at most {MAX_TEXTS}", param=at)
    return list(items)


TEXTS = ValueKind(
    _read_texts,
    {"anyOf": [{"type": "string"}, _SEVERAL | {"items": {"type": "string"}}]},
)


class DocumentFields(FieldTable):
    """A document of a ranking that is not a plain text."""

    text = required(text(), "the document's text")


def _read_documents(at: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise wrong(at, value, "it must be a list of texts, or of objects with a text")
    texts = []
    for place, item in enumerate(_at_most(at, value)):
        if isinstance(item, dict):
            item = read_fields(DocumentFields, item, f"{at}[{place}]").text
        if not isinstance(item, str):
            raise wrong(f"{at}[{place}]", item, "it must be a text, or an object with a text")
        texts.append(item)
    return texts


DOCUMENTS = ValueKind(
    _read_documents,
    _SEVERAL | {"items": {"anyOf": [{"type": "string"}, schema_of(DocumentFields)]}},
    DocumentFields,
    listed=True,
)


class PoolingFields(FieldTable):
    """The fields of all these routes."""

    model = GenerationFields.model
    truncate_prompt_tokens = optional(
        integer(AS_FITS),
        "keep at most this number of tokens of each text, with the tokenizer's own; -1: what fits",
        "all",
    )
    truncation_side = optional(
        choice("left", "right"), "`left` keeps the last tokens, `right` the first ones", "`right`"
    )
    add_special_tokens = flag(
        True, "add the tokenizer's own tokens (BOS, EOS), at which models read the vector"
    )
    priority = optional(
        integer(), "lower ones of your own requests go first ([priority](api.md#priority))", "0"
    )
    user = UnservedFields.user
    mm_processor_kwargs = UnservedFields.mm_processor_kwargs
    request_id = UnservedFields.request_id
    cache_salt = UnservedFields.cache_salt


class EmbeddingFields(PoolingFields, route="/v1/embeddings"):
    """Texts whose vectors are asked for."""

    input = required(prompts(MAX_TEXTS), "each gets a vector")
    dimensions = optional(
        integer(1), "keep this number of a vector's first elements; not all models allow it", "all"
    )
    encoding_format = optional(
        choice("float", "base64"), "`base64`: the bytes of float32, little-endian", "`float`"
    )
    normalize = flag(True, "scale each vector to length 1")
    embed_dtype = refused("vectors are float32", accepts=("float32",))
    endianness = refused("vectors are little-endian", accepts=("little", "native"))


class PairFields(PoolingFields):
    """The fields of routes that score pairs of texts."""

    use_activation = flag(True, "turn the score of a classifier into a probability")


class ScoreFields(PairFields, route="/score"):
    """Pairs whose scores are asked for."""

    text_1 = optional(TEXTS, "the first of each pair; one text stands in all pairs")
    text_2 = optional(TEXTS, "the second of each pair")
    queries = optional(TEXTS, "another name of `text_1`, beside `documents`")
    documents = optional(TEXTS, "another name of `text_2`, beside `queries`")
    data_1 = optional(TEXTS, "another name of `text_1`, beside `data_2`")
    data_2 = optional(TEXTS, "another name of `text_2`, beside `data_1`")

    @rule(
        *(name for names in SIDES for name in names),
        schemas=[
            {
                "anyOf": [
                    {
                        "required": list(names),
                        "properties": dict.fromkeys(names, _GIVEN)
                        | {other: _NULL for pair in SIDES for other in pair if pair != names},
                    }
                    for names in SIDES
                ],
                "description": f"{ONE_OF_EACH}; {LENGTHS_AGREE}",
            }
        ],
    )
    def check_sides(self) -> None:
        self.sides()

    def sides(self) -> Mapping[str, list[str]]:
        """The two sides under their names. Raise InvalidRequest unless they make pairs."""
        given = [names for names in SIDES if gives(self, names[0]) or gives(self, names[1])]
        names = given[0] if given else SIDES[0]
        missing = [name for name in names if not gives(self, name)]
        if missing:
            raise InvalidRequest(f"{missing[0]} is missing; {ONE_OF_EACH}", param=missing[0])
        if len(given) > 1:
            extra = next(name for name in given[1] if gives(self, name))
            raise InvalidRequest(f"{extra} is beside {names[0]}; {ONE_OF_EACH}", param=extra)
        sides: dict[str, list[str]] = {name: getattr(self, name) for name in names}
        first, second = map(len, sides.values())
        if first not in (1, second):
            raise InvalidRequest(
                f"{names[0]} holds {first} texts and {names[1]} {second}; {LENGTHS_AGREE}",
                param=names[1],
            )
        return sides


class RerankFields(PairFields, route="/rerank"):
    """Documents whose order is asked for."""

    query = required(text(), "what the documents are compared with")
    documents = required(DOCUMENTS, "texts, or objects with a `text`")
    top_n = optional(integer(0), "show this number of the best documents; 0: all", "all")
    return_documents = flag(True, "show each document's text")
    rank_fields = refused("a document is its text")
    max_chunks_per_doc = refused("documents are not divided; use `truncate_prompt_tokens`")
    max_tokens_per_doc = refused("use `truncate_prompt_tokens`")
