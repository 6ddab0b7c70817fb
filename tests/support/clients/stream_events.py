"""The events of a recorded stream, in any dialect, without what differs between two streams of one
request: ids, times, and how much of the prompt was cached."""

from __future__ import annotations

import json
import re

from tests.support.clients.http import Json

DATA = re.compile(rb"^data: (\{.*\})$", re.MULTILINE)
CREATED = re.compile(rb'"created(?:_at)?":\d+')
CALL_ID = re.compile(rb'"call_[0-9a-f]+"')


def plain_stream(data: bytes, request: str) -> bytes:
    """The stream without the request's id, the ids of its calls and its time."""
    assert len(set(CREATED.findall(data))) <= 1, "a stream has one time"
    data = CREATED.sub(b'"created":0', data.replace(request.encode(), b""))
    return CALL_ID.sub(b'"call"', data)


def plain_events(data: bytes, request: str) -> list[Json]:
    """The JSON of a stream's events, without what differs."""
    events: list[Json] = [json.loads(each) for each in DATA.findall(plain_stream(data, request))]
    for event in events:
        _forget_cached(event.get("usage") or event.get("response", {}).get("usage") or {})
    return events


def _forget_cached(usage: Json) -> None:
    for name in ("prompt_tokens_details", "input_tokens_details"):
        usage.pop(name, None)
    for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
        usage["input_tokens"] = usage.get("input_tokens", 0) + usage.pop(name, 0)
