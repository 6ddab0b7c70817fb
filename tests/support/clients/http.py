"""A plain HTTP client for end-to-end tests, which sends what a user's curl would."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 240.0

Json = dict[str, Any]


class Answer:
    """Status, headers and JSON body of one exchange."""

    def __init__(self, status: int, headers: dict[str, str], body: Json) -> None:
        self.status = status
        self.headers = headers
        self.body = body


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1", url
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)


def _send(
    connection: http.client.HTTPConnection,
    path: str,
    body: Json | bytes | None,
    extra: Mapping[str, str] | None = None,
) -> None:
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"content-type": "application/json", "connection": "close", **(extra or {})}
    connection.request("POST" if data is not None else "GET", path, data, headers)


def _open(
    url: str, path: str, body: Json | bytes | None, headers: Mapping[str, str] | None = None
) -> http.client.HTTPResponse:
    connection = _connect(url)
    _send(connection, path, body, headers)
    return connection.getresponse()


def exchange(
    url: str,
    path: str,
    body: Json | bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """POST `body` (or GET without one) and read the JSON answer, whatever its status."""
    with _open(url, path, body, headers) as response:
        response_headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, response_headers, json.loads(response.read()))


def text_of(url: str, path: str, headers: Mapping[str, str] | None = None) -> str:
    with _open(url, path, None, headers) as response:
        return response.read().decode()


def hang_up(
    url: str, path: str, body: Json, after_s: float, headers: Mapping[str, str] | None = None
) -> None:
    """POST `body` and close the connection without reading a byte of the answer."""
    connection = _connect(url)
    _send(connection, path, body, headers)
    time.sleep(after_s)
    connection.close()


def events(
    url: str, path: str, body: Json, headers: Mapping[str, str] | None = None
) -> Generator[Json, None, None]:
    """Yield the JSON events of one SSE stream up to [DONE]; an early end raises AssertionError.
    close() on the generator closes the connection."""
    with _open(url, path, {**body, "stream": True}, headers) as response:
        assert response.status == 200, response.read()
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)
    raise AssertionError("the stream ended without [DONE]")


def complete(url: str, prompt: Sequence[int] | str, **fields: Any) -> Answer:
    """Send one /v1/completions request; token ids come back in choices[].token_ids."""
    prompt = prompt if isinstance(prompt, str) else list(prompt)
    answer = exchange(
        url, "/v1/completions", {"prompt": prompt, "return_token_ids": True, **fields}
    )
    assert answer.status == 200, answer.body
    return answer


def ids_of(answer: Answer) -> list[list[int]]:
    """Return the token ids of each choice, in the order of choice indices."""
    choices = sorted(answer.body["choices"], key=lambda c: c["index"])
    return [choice["token_ids"] for choice in choices]


def all_at_once(url: str, prompts: Sequence[Sequence[int]], **fields: Any) -> list[Answer]:
    """Send each prompt as its own request, all concurrently."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(lambda prompt: complete(url, prompt, **fields), prompts))
