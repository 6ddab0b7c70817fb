"""One operation of the OpenAPI document: a method of a route, with its answers and errors.

In: a row of `openapi_operations`. Out: its JSON. Schemas of records and bodies are references to
the document's components.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Literal, get_args

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
from baton_router.http.media_types import (
    BYTES_TYPE,
    EVENTS_TYPE,
    FORM_TYPE,
    JSON_TYPE,
    TEXT_TYPE,
)
from baton_router.http.resumes import EVENTS_PATH
from baton_router.openai.answers import (
    ErrorAnswer,
)

Json = dict[str, Any]
REF = "#/components/schemas/{name}"

# Groups of operations for generated clients and pages.
Tag = Literal[
    "generation",
    "responses",
    "pooling",
    "batches",
    "tokens",
    "models",
    "requests",
    "health",
    "operations",
]
PARAMETERS: Mapping[str, str] = {
    "model": "The model's name, as `/v1/models` lists it.",
    "id": "The id of a request, from the `x-baton-request-id` header of its answer; or of a prefix,"
    " a file or a batch, as its list has it.",
    "response": "The id of a response that is kept.",
    "node": "The node's id, as `/pool` lists it.",
    "name": "The name of a file.",
}

Record = type | UnionType  # of an answer; a union's records are alternatives
Errors = Sequence[type[BatonError]]
# Errors of any operation: a bad header, a page of a foreign origin, a bug of the router.
ANY: Errors = (InvalidRequest, Forbidden, InternalError)
KEYED: Errors = (*ANY, Unauthorized)
WITH_BODY: Errors = (*KEYED, NotFound, BodyTimeout, TooLarge, Saturated, Unavailable)
STORED: Errors = (*KEYED, NotFound, Unavailable)
GENERATION: Errors = (*WITH_BODY, DeadlineExceeded)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAPIOperation:
    """One method of one route.

    `answers` are the successful answers by status (and any other without the error's shape); with
    `listed`, a list of them. `event` is the record in a stream's events, `failure` that of errors.
    `sent` is the record in the events of an answer that is always a stream, by their name.
    `body` is a key of BODIES; with `form`, clients send it as a form. An answer of the type `bytes`
    is a file's content, of the type `media`.
    The operation needs a key if its errors include Unauthorized. `query` are its query
    parameters. `alias`: another operation does the same under its own path."""

    method: str
    path: str
    tag: Tag
    summary: str
    description: str
    answers: Mapping[int, Record | None]
    media: str = BYTES_TYPE
    errors: Errors = ANY
    body: str | None = None
    body_required: bool = True
    form: bool = False
    event: Record | None = None
    sent: tuple[str, Record] | None = None
    failure: type = ErrorAnswer
    listed: bool = False
    query: Mapping[str, Json] = field(default_factory=dict)
    alias: bool = False

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
                "content": {FORM_TYPE if self.form else JSON_TYPE: {"schema": schema}},
            }
        operation["responses"] = self._responses()
        return operation

    @property
    def name(self) -> str:
        words = re.findall(r"\w+", self.path if self.alias else self.path.removeprefix("/v1"))
        return "_".join([self.method.lower(), *words])

    @property
    def is_placed(self) -> bool:
        """Whether nodes run it, so that the answer says where."""
        return DeadlineExceeded in self.errors

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
                "headers": _headers(placed=self.is_placed),
                "content": self._content(answer),
            }
            for status, answer in self.answers.items()
        }
        for error in sorted(self.errors, key=lambda error: error.status):
            if error.status not in self.answers:
                responses[str(error.status)] = _failure(error, self.failure, placed=self.is_placed)
        return responses

    def _content(self, answer: Record | None) -> Json:
        if answer is dict:
            return {JSON_TYPE: {"schema": {"type": "object"}}}
        if answer is bytes:
            return {self.media: {"schema": {"type": "string", "format": "binary"}}}
        if self.sent is not None:
            return {EVENTS_TYPE: {"schema": _sent_event(*self.sent)}}
        if answer is str:
            return {EVENTS_TYPE: {"schema": {"type": "string"}}}
        if answer is None:
            return {TEXT_TYPE: {"schema": {"type": "string"}}}
        schema = schema_ref(answer)
        if self.listed:
            schema = {"type": "array", "items": schema}
        content: Json = {JSON_TYPE: {"schema": schema}}
        if self.event is not None:
            content[EVENTS_TYPE] = {"schema": _event(self.event, self.failure)}
        return content


def schema_ref(answer: Record) -> Json:
    if isinstance(answer, UnionType):
        return {"anyOf": [schema_ref(record) for record in get_args(answer)]}
    return {"$ref": REF.format(name=answer.__name__)}


def _event(event: Record, failure: type) -> Json:
    """The schema of one event of a stream, since OpenAPI 3.1 cannot describe the sequence."""
    shapes = {"anyOf": [schema_ref(event), schema_ref(failure)]}
    encoded = {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": shapes}
    data = {"anyOf": [{"const": "[DONE]"}, encoded]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _sent_event(name: str, record: Record) -> Json:
    """The schema of one event of a stream whose events all have this name."""
    data = {"type": "string", "contentMediaType": JSON_TYPE, "contentSchema": schema_ref(record)}
    properties: Json = {"event": {"const": name}, "data": data}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _path_parameter(name: str) -> Json:
    return {
        "name": name,
        "in": "path",
        "description": PARAMETERS[name],
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    }


def _failure(error: type[BatonError], record: type, *, placed: bool) -> Json:
    headers = _headers(placed=placed)
    if error.retryable:
        headers["Retry-After"] = _header("seconds", {"type": "integer", "minimum": 1})
    return {
        "description": error.type,
        "headers": headers,
        "content": {JSON_TYPE: {"schema": schema_ref(record)}},
    }


def _headers(*, placed: bool) -> Json:
    headers = {
        "x-request-id": _header("the client's own x-request-id, or else x-baton-request-id"),
        "x-baton-request-id": _header("names the request in the log"),
    }
    if placed:
        headers["x-baton-placement"] = _header("the request's placement and its reason")
        headers["x-baton-exact"] = {
            "description": "how exact the request's nodes compute; absent while they are unknown",
            "schema": {"type": "string", "enum": list(get_args(Exact))},
        }
    return headers


def _header(description: str, schema: Json | None = None) -> Json:
    return {"description": description, "required": True, "schema": schema or {"type": "string"}}
