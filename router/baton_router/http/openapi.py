"""GET /openapi.json: an OpenAPI 3.1 document of each route, derived from the code of the router.

In: the tables of the bodies' fields (`openai/fields`), the records that answers are encoded from,
and the error vocabulary. Out: the document. OPERATIONS has a row for each route of
the application; a test checks that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, Literal, get_args

import msgspec

from baton_protocol.errors import (
    BatonError,
    BodyTimeout,
    DeadlineExceeded,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    Saturated,
    TooLarge,
    Unauthorized,
    Unavailable,
)
from baton_protocol.store import Exact
from baton_router.http.drain import DrainFields, NodeDrain
from baton_router.http.headers import LAST_EVENT_HEADER, RESUME_HEADER
from baton_router.http.media_types import EVENTS_TYPE, JSON_TYPE, TEXT_TYPE
from baton_router.http.node_sleep import NodeSleep, SleepFields, WakeFields
from baton_router.http.pool_records import Pool
from baton_router.http.prefix_cache import RESET_PATH, CacheReset
from baton_router.http.prefixes import PREFIXES_PATH, Prefix, PrefixFields, PrefixList
from baton_router.http.readiness import Health, Readiness
from baton_router.http.resumes import EVENTS_PATH
from baton_router.http.token_routes import (
    CHAT_RENDER,
    COMPLETIONS_RENDER,
    DETOKENIZE,
    TOKENIZE,
    TOKENIZER_INFO,
    Detokenized,
    RenderedPrompt,
    Tokenized,
)
from baton_router.observability.explanation import Explanation
from baton_router.openai.answers import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ErrorAnswer,
    Model,
    ModelList,
)
from baton_router.openai.fields.chat import ChatFields
from baton_router.openai.fields.completions import CompletionFields
from baton_router.openai.fields.table import FieldTable, schema_of
from baton_router.openai.fields.tokens import DetokenizeFields, TokenizeFields

Json = dict[str, Any]
OPENAPI = "3.1.0"
REF = "#/components/schemas/{name}"

# The tables of the bodies, by the names of their schemas.
BODIES: Mapping[str, type[FieldTable]] = {
    "ChatRequest": ChatFields,
    "CompletionRequest": CompletionFields,
    "TokenizeRequest": TokenizeFields,
    "DetokenizeRequest": DetokenizeFields,
    "DrainRequest": DrainFields,
    "PrefixRequest": PrefixFields,
    "SleepRequest": SleepFields,
    "WakeRequest": WakeFields,
}

# Groups of operations for generated clients and pages.
Tag = Literal["generation", "tokens", "models", "requests", "health", "operations"]
TAGS: Mapping[Tag, str] = {
    "generation": "Answers to conversations and continuations of prompts.",
    "tokens": "The tokens of texts and conversations, and the texts of tokens.",
    "models": "The models that the pool serves.",
    "requests": "How a request was served: its placement, the reason, and how long each part took.",
    "health": "Whether the router is alive, whether it can serve, and what it serves.",
    "operations": "For operators of the pool: its state, its metrics, drains and sleep of nodes.",
}
PARAMETERS: Mapping[str, str] = {
    "model": "The model's name, as `/v1/models` lists it.",
    "id": "The id of a request, from the `x-baton-request-id` header of its answer; or of a prefix,"
    " as `/prefixes` lists it.",
    "node": "The node's id, as `/pool` lists it.",
}
INFO: Json = {
    "title": "Baton",
    "version": version("baton-serve"),
    "description": "OpenAI's API for the models of one pool, and the routes for its operators. "
    "API keys are required only if the router has a file of keys.",
    "contact": {"name": "The Baton authors"},
    "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
}
SECURITY: Json = {
    "key": {
        "type": "http",
        "scheme": "bearer",
        "description": "A tenant's API key. `/pool`, `/metrics`, `/nodes` and `/prefixes` need an "
        "admin key; the last two also accept the pool's link token.",
    }
}

ALL_NODES: Json = {
    "description": "Check every node, and list those that are not ready.",
    "schema": {"type": "string", "enum": ["1", "true", "0", "false"], "default": "0"},
}
NO_EFFECT: Json = {
    "description": "No effect: running requests do not hinder a reset.",
    "schema": {"type": "string", "enum": ["true", "false"], "default": "false"},
}
WHOSE_TOKENIZER: Json = {
    "description": PARAMETERS["model"],
    "schema": {"type": "string"},
}
NOT_SERVED: Json = {
    "description": "Whether to clear the KV store, which is not supported.",
    "schema": {"type": "string", "enum": ["false"], "default": "false"},
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

Errors = Sequence[type[BatonError]]
# Errors of any operation: a bad header, a page of a foreign origin, a bug of the router.
_ANY: Errors = (InvalidRequest, Forbidden, InternalError)
_KEYED: Errors = (*_ANY, Unauthorized)
_WITH_BODY: Errors = (*_KEYED, NotFound, BodyTimeout, TooLarge, Saturated, Unavailable)
_GENERATION: Errors = (*_WITH_BODY, DeadlineExceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAPIOperation:
    """One method of one route.

    `answers` are the successful answers by status (and any other without the error's shape); with
    `listed`, a list of them. `event` is the record in a stream's events. `body` is a key of BODIES.
    The operation needs a key if its errors include Unauthorized. `query` are its query
    parameters."""

    method: str
    path: str
    tag: Tag
    summary: str
    description: str
    answers: Mapping[int, type | None]
    errors: Errors = _ANY
    body: str | None = None
    body_required: bool = True
    event: type | None = None
    listed: bool = False
    query: Mapping[str, Json] = field(default_factory=dict)

    def json(self) -> Json:
        operation: Json = {
            "operationId": self.name,
            "tags": [self.tag],
            "summary": self.summary,
            "description": self.description,
            # {} allows no key, for routers without keys.
            "security": [{"key": []}, {}] if Unauthorized in self.errors else [],
        }
        operation["parameters"] = [
            *(_path_parameter(name) for name in re.findall(r"{(\w+)}", self.path)),
            *({"name": name, "in": "query", **schema} for name, schema in self.query.items()),
            *({"$ref": f"#/components/parameters/{name}"} for name in self._headers()),
        ]
        if self.body is not None:
            schema = {"$ref": REF.format(name=self.body)}
            operation["requestBody"] = {
                "required": self.body_required,
                "content": {JSON_TYPE: {"schema": schema}},
            }
        operation["responses"] = self._responses()
        return operation

    @property
    def name(self) -> str:
        words = re.findall(r"\w+", self.path.removeprefix("/v1"))
        return "_".join([self.method.lower(), *words])

    def _headers(self) -> Sequence[str]:
        """Names of its header parameters among the components."""
        if self.event is not None:
            return ("Resume", "LastEvent", "RequestId")
        return ("LastEvent", "RequestId") if self.path == EVENTS_PATH else ("RequestId",)

    def _responses(self) -> Json:
        responses = {
            str(status): {
                "description": "success"
                if status == 200
                else "not ready; the answer gives the reason",
                "headers": _headers(generation=self.event is not None),
                "content": self._content(answer),
            }
            for status, answer in self.answers.items()
        }
        for error in sorted(self.errors, key=lambda error: error.status):
            if error.status not in self.answers:
                responses[str(error.status)] = _failure(error, generation=self.event is not None)
        return responses

    def _content(self, answer: type | None) -> Json:
        if answer is dict:
            return {JSON_TYPE: {"schema": {"type": "object"}}}
        if answer is str:
            return {EVENTS_TYPE: {"schema": {"type": "string"}}}
        if answer is None:
            return {TEXT_TYPE: {"schema": {"type": "string"}}}
        schema = _ref(answer)
        if self.listed:
            schema = {"type": "array", "items": schema}
        content: Json = {JSON_TYPE: {"schema": schema}}
        if self.event is not None:
            content[EVENTS_TYPE] = {"schema": _event(self.event)}
        return content


OPERATIONS = (
    OpenAPIOperation(
        method="POST",
        path="/v1/chat/completions",
        tag="generation",
        summary="Answer a conversation",
        description="Generates the next message of a conversation, rendered with the model's chat "
        "template. With `stream` the answer is a sequence of server-sent events, and "
        "the schema is that of one event.",
        answers={200: ChatCompletion},
        errors=_GENERATION,
        body="ChatRequest",
        event=ChatCompletionChunk,
    ),
    OpenAPIOperation(
        method="POST",
        path="/v1/completions",
        tag="generation",
        summary="Continue one or several prompts",
        description="Generates the continuation of a prompt, or of each prompt of a list. With "
        "`stream` the answer is a sequence of server-sent events, and the schema "
        "is that of one event.",
        answers={200: Completion},
        errors=_GENERATION,
        body="CompletionRequest",
        event=CompletionChunk,
    ),
    OpenAPIOperation(
        method="POST",
        path=CHAT_RENDER,
        tag="tokens",
        summary="The prompt of a conversation",
        description="Renders and tokenizes the prompt that the same body would have as a chat, and "
        "generates nothing.",
        answers={200: RenderedPrompt},
        errors=_WITH_BODY,
        body="ChatRequest",
    ),
    OpenAPIOperation(
        method="POST",
        path=COMPLETIONS_RENDER,
        tag="tokens",
        summary="The prompts of a completion",
        description="Tokenizes the prompts that the same body would have as a completion, and "
        "generates nothing.",
        answers={200: RenderedPrompt},
        errors=_WITH_BODY,
        body="CompletionRequest",
        listed=True,
    ),
    OpenAPIOperation(
        method="POST",
        path=TOKENIZE,
        tag="tokens",
        summary="The tokens of a text or a conversation",
        description="Tokenizes a text, or a conversation rendered with the model's chat template. "
        "It may be longer than the model's context.",
        answers={200: Tokenized},
        errors=_WITH_BODY,
        body="TokenizeRequest",
    ),
    OpenAPIOperation(
        method="POST",
        path=DETOKENIZE,
        tag="tokens",
        summary="The text of tokens",
        description="Decodes ids of tokens, special ones included.",
        answers={200: Detokenized},
        errors=_WITH_BODY,
        body="DetokenizeRequest",
    ),
    OpenAPIOperation(
        method="GET",
        path=TOKENIZER_INFO,
        tag="tokens",
        summary="The tokenizer's configuration",
        description="The model's `tokenizer_config.json`, with its chat template.",
        answers={200: dict},
        errors=(*_KEYED, NotFound, Unavailable),
        query={"model": WHOSE_TOKENIZER},
    ),
    OpenAPIOperation(
        method="GET",
        path="/v1/models",
        tag="models",
        summary="List the models",
        description="Lists the models that clients may name: one, or two while the pool rolls "
        "out another.",
        answers={200: ModelList},
        errors=_KEYED,
    ),
    OpenAPIOperation(
        method="GET",
        path="/v1/models/{model}",
        tag="models",
        summary="Get a model",
        description="Describes one model of the list.",
        answers={200: Model},
        errors=(*_KEYED, NotFound),
    ),
    OpenAPIOperation(
        method="GET",
        path="/health",
        tag="health",
        summary="Is the router alive?",
        description="Answers 200 while the router's process runs.",
        answers={200: Health},
    ),
    OpenAPIOperation(
        method="GET",
        path="/ready",
        tag="health",
        summary="Can the router serve a request now?",
        description="Answers 200 if the router can serve a request now, else 503 with the "
        "reason. With `all`, answers 200 only if every known node is ready too.",
        answers={200: Readiness, 503: Readiness},
        query={"all": ALL_NODES},
    ),
    OpenAPIOperation(
        method="GET",
        path="/metrics",
        tag="operations",
        summary="Metrics",
        description="The router's metrics in Prometheus' text format.",
        answers={200: None},
        errors=_KEYED,
    ),
    OpenAPIOperation(
        method="GET",
        path="/pool",
        tag="operations",
        summary="State of the pool",
        description="Lists the pool's nodes with their state, load and caches, and sums up the KV "
        "store and all requests.",
        answers={200: Pool},
        errors=_KEYED,
    ),
    OpenAPIOperation(
        method="GET",
        path="/requests/{id}",
        tag="requests",
        summary="How a request was served",
        description="Shows where a request was placed and why, what each attempt did, and how "
        "long it took. The router knows its running requests and the latest ended "
        "ones.",
        answers={200: Explanation},
        errors=(*_KEYED, NotFound),
    ),
    OpenAPIOperation(
        method="GET",
        path=EVENTS_PATH,
        tag="requests",
        summary="The rest of a stream",
        description="Sends a stream that was requested with the header `x-baton-resume`, from any "
        "router of the pool: what follows the event in `Last-Event-ID`, or all of it.",
        answers={200: str},
        errors=_GENERATION,
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/drain",
        tag="operations",
        summary="Drain a node",
        description="The node takes no new requests; its running requests end there or move to "
        "another node. The router answers once the node drains.",
        answers={200: NodeDrain},
        errors=_WITH_BODY,
        body="DrainRequest",
        body_required=False,
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/resume",
        tag="operations",
        summary="Resume a node",
        description="Undoes a drain. The router answers once the node takes requests again.",
        answers={200: NodeDrain},
        errors=_WITH_BODY,
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/sleep",
        tag="operations",
        summary="Put a node to sleep",
        description="The node drains, and its engine gives its memory back until an operator wakes"
        " it. The router answers once it sleeps.",
        answers={200: NodeSleep},
        errors=_WITH_BODY,
        body="SleepRequest",
        body_required=False,
    ),
    OpenAPIOperation(
        method="POST",
        path="/nodes/{node}/wake",
        tag="operations",
        summary="Wake a node up",
        description="Its engine takes its memory again. The router answers once it has it.",
        answers={200: NodeSleep},
        errors=_WITH_BODY,
        body="WakeRequest",
        body_required=False,
    ),
    OpenAPIOperation(
        method="POST",
        path=RESET_PATH,
        tag="operations",
        summary="Reset the prefix caches",
        description="All nodes forget the KV in their prefix caches. Running requests go on; the KV"
        " store is not cleared.",
        answers={200: CacheReset},
        errors=(*_KEYED, Forbidden, InvalidRequest),
        query={"reset_running_requests": NO_EFFECT, "reset_external": NOT_SERVED},
    ),
    OpenAPIOperation(
        method="POST",
        path=PREFIXES_PATH,
        tag="operations",
        summary="Pin a prefix",
        description="All nodes keep the KV of a prompt in their caches for some time. Beside the"
        " fields of the schema, the body has those of a ChatRequest or of a CompletionRequest, of"
        " which the prompt counts. The router answers once a node has begun to load it.",
        answers={200: Prefix},
        errors=_WITH_BODY,
        body="PrefixRequest",
    ),
    OpenAPIOperation(
        method="GET",
        path=PREFIXES_PATH,
        tag="operations",
        summary="List the pinned prefixes",
        description="Lists the pinned prefixes, and which nodes have them.",
        answers={200: PrefixList},
        errors=_KEYED,
    ),
    OpenAPIOperation(
        method="DELETE",
        path=f"{PREFIXES_PATH}/{{id}}",
        tag="operations",
        summary="Unpin a prefix",
        description="Nodes may evict the prefix from now on. Answers with what it was.",
        answers={200: Prefix},
        errors=(*_KEYED, NotFound),
    ),
    OpenAPIOperation(
        method="GET",
        path="/openapi.json",
        tag="health",
        summary="This document",
        description="This OpenAPI 3.1 document.",
        answers={200: dict},
    ),
)


def document(operations: Sequence[OpenAPIOperation] = OPERATIONS) -> Json:
    """The same document for every router, whatever its settings."""
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation.json()
    return {
        "openapi": OPENAPI,
        "info": INFO,
        # Relative to the router that serves the document.
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": {name: schema_of(table) for name, table in BODIES.items()}
            | _schemas(operations),
            "parameters": {"RequestId": REQUEST_ID, "Resume": RESUME, "LastEvent": LAST_EVENT},
            "securitySchemes": SECURITY,
        },
    }


def _ref(answer: type) -> Json:
    return {"$ref": REF.format(name=answer.__name__)}


def _schemas(operations: Sequence[OpenAPIOperation]) -> dict[str, Json]:
    """Schemas of all answers and of the records in them, for `components/schemas`."""
    answers: list[type | None] = [ErrorAnswer]
    for operation in operations:
        answers += [*operation.answers.values(), operation.event]
    records = dict.fromkeys(answer for answer in answers if answer not in (None, dict))
    _, components = msgspec.json.schema_components(records, ref_template=REF)
    for component in components.values():
        for field_schema in component.get("properties", {}).values():
            if "pattern" in field_schema:
                # msgspec writes Python's \Z for the end of a text; JSON Schema uses `$`.
                field_schema["pattern"] = field_schema["pattern"].replace(r"\Z", "$")
            if field_schema.get("default") == ():
                field_schema["default"] = []  # a tuple is no JSON
    return components


def _event(event: type) -> Json:
    """The schema of one event of a stream, since OpenAPI 3.1 cannot describe the sequence."""
    shapes = {"anyOf": [_ref(event), _ref(ErrorAnswer)]}
    encoded = {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": shapes}
    data = {"anyOf": [{"const": "[DONE]"}, encoded]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _path_parameter(name: str) -> Json:
    return {
        "name": name,
        "in": "path",
        "description": PARAMETERS[name],
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }


def _failure(error: type[BatonError], *, generation: bool) -> Json:
    headers = _headers(generation=generation)
    if error.retryable:
        headers["Retry-After"] = _header("seconds", {"type": "integer", "minimum": 1})
    return {
        "description": error.type,
        "headers": headers,
        "content": {JSON_TYPE: {"schema": _ref(ErrorAnswer)}},
    }


def _headers(*, generation: bool) -> Json:
    headers = {
        "x-request-id": _header("the client's own x-request-id, or else x-baton-request-id"),
        "x-baton-request-id": _header("names the request in the log"),
    }
    if generation:
        headers["x-baton-placement"] = _header("the request's placement and its reason")
        headers["x-baton-exact"] = {
            "description": "how exact the request's nodes compute; absent while they are unknown",
            "schema": {"type": "string", "enum": list(get_args(Exact))},
        }
    return headers


def _header(description: str, schema: Json | None = None) -> Json:
    return {"description": description, "required": True, "schema": schema or {"type": "string"}}
