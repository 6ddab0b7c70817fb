"""GET /openapi.json: an OpenAPI 3.1 document of each route, derived from the code of the router.

In: the tables of the bodies' fields (`openai/fields`), the records that answers are encoded from,
the error vocabulary, and the rows of `openapi_operations`. Out: the document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import msgspec

from baton_router.anthropic.fields import CountFields, MessagesFields
from baton_router.http.batch_routes import (
    BatchFields,
)
from baton_router.http.drain import DrainFields
from baton_router.http.file_routes import FileFields
from baton_router.http.headers import LAST_EVENT_HEADER, RESUME_HEADER
from baton_router.http.node_sleep import SleepFields, WakeFields
from baton_router.http.openapi_operation import (
    REF,
    Json,
    OpenAPIOperation,
    Record,
    Tag,
)
from baton_router.http.openapi_operations import OPERATIONS
from baton_router.http.prefixes import PrefixFields
from baton_router.http.server_info import VERSION
from baton_router.openai.fields.batch_chat import BatchChatFields
from baton_router.openai.fields.chat import ChatFields
from baton_router.openai.fields.completions import CompletionFields
from baton_router.openai.fields.table import FieldTable, schema_of
from baton_router.openai.fields.tokens import DetokenizeFields, TokenizeFields
from baton_router.pooling.fields import EmbeddingFields, RerankFields, ScoreFields
from baton_router.responses.fields import InputTokenFields, ResponseFields
from baton_router.tokens.generate_fields import GenerateFields
from baton_router.tokens.scoring_fields import ScoringFields

OPENAPI = "3.1.0"

# The tables of the bodies, by the names of their schemas.
BODIES: Mapping[str, type[FieldTable]] = {
    "ChatRequest": ChatFields,
    "BatchChatRequest": BatchChatFields,
    "CompletionRequest": CompletionFields,
    "MessagesRequest": MessagesFields,
    "CountTokensRequest": CountFields,
    "ResponseRequest": ResponseFields,
    "InputTokensRequest": InputTokenFields,
    "EmbeddingRequest": EmbeddingFields,
    "ScoreRequest": ScoreFields,
    "RerankRequest": RerankFields,
    "TokenizeRequest": TokenizeFields,
    "DetokenizeRequest": DetokenizeFields,
    "GenerateRequest": GenerateFields,
    "ScoringRequest": ScoringFields,
    "DrainRequest": DrainFields,
    "PrefixRequest": PrefixFields,
    "SleepRequest": SleepFields,
    "WakeRequest": WakeFields,
    "FileRequest": FileFields,
    "BatchRequest": BatchFields,
}

TAGS: Mapping[Tag, str] = {
    "generation": "Answers to conversations and continuations of prompts.",
    "responses": "OpenAI's Responses API: answers that are streamed as events, kept and continued.",
    "pooling": "Vectors of texts, and scores of pairs of texts.",
    "batches": "Requests of a file that run when the pool has room, and the files.",
    "tokens": "The tokens of texts and conversations, and the texts of tokens.",
    "models": "The models that the pool serves.",
    "requests": "How a request was served: its placement, the reason, and how long each part took.",
    "health": "Whether the router is alive, whether it can serve, and what it serves.",
    "operations": "For operators of the pool: its state, its metrics, drains and sleep of nodes.",
}
INFO: Json = {
    "title": "Baton",
    "version": VERSION,
    "description": "OpenAI's API and Anthropic's Messages API for the models of one pool, and the "
    "routes for its operators. "
    "API keys are required only if the router has a file of keys.",
    "contact": {"name": "The Baton authors"},
    "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
}
SECURITY: Json = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A tenant's API key. `/pool`, `/load`, `/metrics`, `/nodes` and `/prefixes` "
        "need an admin key; the last two also accept the pool's link token.",
    }
}

RESUME: Json = {
    "name": RESUME_HEADER,
    "in": "header",
    "description": "Seconds for which the stream outlives its client and its router, at most "
    "`--max-resume`. Its events then have ids.",
    "schema": {"type": "integer", "minimum": 1},
}
LAST_EVENT: Json = {
    "name": LAST_EVENT_HEADER,
    "in": "header",
    "description": "The id of the last event that arrived: the answer is what follows it in the "
    "same stream. The body has no effect then.",
    "schema": {"type": "string"},
}
REQUEST_ID: Json = {
    "name": "x-request-id",
    "in": "header",
    "description": "The client's own request id, 1 to 128 printable ASCII characters. The "
    "answer repeats it, and the log contains it. Any other value is ignored.",
    "schema": {"type": "string"},
}


def document(operations: Sequence[OpenAPIOperation] = OPERATIONS, *, root_path: str = "") -> Json:
    """The same document for every router, whatever its settings; `root_path` is the path at which
    clients find it."""
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation.json()
    return {
        "openapi": OPENAPI,
        "info": INFO,
        # Relative to the router that serves the document.
        "servers": [{"url": root_path or "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": {name: schema_of(table) for name, table in BODIES.items()}
            | _schemas(operations),
            "parameters": {"RequestId": REQUEST_ID, "Resume": RESUME, "LastEvent": LAST_EVENT},
            "securitySchemes": SECURITY,
        },
    }


def _schemas(operations: Sequence[OpenAPIOperation]) -> dict[str, Json]:
    """Schemas of all answers and of the records in them, for `components/schemas`."""
    answers: list[Record | None] = []
    for operation in operations:
        answers += [*operation.answers.values(), operation.event, operation.failure]
        answers += [] if operation.sent is None else [operation.sent[1]]
    alternatives = [get_args(answer) or (answer,) for answer in answers]
    records = dict.fromkeys(
        record for one in alternatives for record in one if record not in (None, dict, bytes)
    )
    _, components = msgspec.json.schema_components(records, ref_template=REF)
    for component in components.values():
        for field_schema in component.get("properties", {}).values():
            if "pattern" in field_schema:
                # msgspec writes Python's \Z for the end of a text; JSON Schema uses `$`.
                field_schema["pattern"] = field_schema["pattern"].replace(r"\Z", "$")
            if field_schema.get("default") == ():
                field_schema["default"] = []  # a tuple is no JSON
    return components
