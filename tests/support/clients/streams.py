"""A client that records one answer: its content, the times of its events, and its end.

In: a body. Out: StreamedAnswer. The client never retries: what the pool fails to deliver is missing
in the record.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tests.support.clients.http import Json
from tests.support.clients.mix import Result

TIMEOUT_S = 240.0


@dataclass
class StreamedAnswer:
    """One answer, as far as it has arrived. `cached` is cached_tokens of the usage; `at` holds the
    times (time.monotonic()) of the request, of each event or comment line, and of the end."""

    status: int = 0
    request: str = ""
    placement: str = ""
    result: Result = field(default_factory=Result)
    cached: int | None = None
    error: Json | None = None
    whole: bool = False  # the answer is complete: [DONE] arrived, or all of its JSON
    at: list[float] = field(default_factory=list)

    @property
    def worst_pause_s(self) -> float:
        return max((b - a for a, b in zip(self.at, self.at[1:], strict=False)), default=0.0)

    def add(self, body: Json) -> None:
        if "error" in body:
            self.error = body["error"]
            return
        self.result.add(body)
        if usage := body.get("usage"):
            self.cached = usage["prompt_tokens_details"]["cached_tokens"]


def ask(
    url: str,
    path: str,
    body: Json,
    on_event: Callable[[StreamedAnswer], bool] = lambda answer: True,
    timeout_s: float = TIMEOUT_S,
) -> StreamedAnswer:
    """POST `body` and read the answer to its end. `on_event` is called after each event; if it
    returns false, the client hangs up."""
    answer = StreamedAnswer(at=[time.monotonic()])
    parts = urlsplit(url)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    try:
        headers = {"content-type": "application/json", "connection": "close"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        answer.status = response.status
        answer.request = response.headers.get("x-baton-request-id", "")
        answer.placement = response.headers.get("x-baton-placement", "")
        if response.status == 200 and body.get("stream"):
            for event in _events(response, answer):
                answer.add(event)
                if not on_event(answer):
                    return answer
        else:
            answer.add(json.loads(response.read()))
            answer.whole = True
    except (OSError, http.client.HTTPException) as error:
        answer.error = {"message": f"the connection broke: {error!r}", "code": "client"}
    finally:
        answer.at.append(time.monotonic())
        connection.close()
    return answer


def _events(response: http.client.HTTPResponse, answer: StreamedAnswer) -> Iterator[Json]:
    for raw in response:
        line = raw.decode().strip()
        if line:
            answer.at.append(time.monotonic())
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            answer.whole = True
            return
        yield json.loads(data)
