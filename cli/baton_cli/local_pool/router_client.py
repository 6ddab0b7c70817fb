"""The supervisor's client of the router: blocking HTTP with the standard library.

In: the router's address. Out: /pool as records, and one streamed chat request with its timings. The
supervisor calls it in a thread. It does without aiohttp, which costs 0.2 s and 40 MB, because it
starts before everything else.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton_cli.errors import CommandError
from baton_node.server.transfer_summary import chunk_line
from baton_protocol.layout import KVLayout

POLL_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 600.0
ANSWER_TOKENS = 256


@dataclass(frozen=True)
class NodeView:
    """The fields of a node in /pool that the live table needs."""

    id: str
    role: str
    pid: int
    state: str
    address: str
    requests: int
    exact: str


@dataclass(frozen=True)
class PoolView:
    """`ready` is the answer of /ready: a request would be served now. `requests` counts the
    router's running requests. `chunks` describes the chunks in which nodes exchange KV."""

    ready: bool
    requests: int
    nodes: tuple[NodeView, ...]
    chunks: str = ""


@dataclass(frozen=True)
class Answer:
    """One chat answer. Times are in seconds; `tokens` counts the completion's tokens."""

    text: str
    placement: str
    first_token_s: float
    total_s: float
    tokens: int
    prompt_tokens: int


@dataclass(frozen=True)
class RouterAddress:
    """Where the router listens, and how to reach it from this machine; `key` is the admin key."""

    host: str
    port: int
    key: str = field(default="", repr=False)

    @property
    def dial(self) -> str:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)

    @property
    def url(self) -> str:
        shown = f"[{self.dial}]" if ":" in self.dial else self.dial
        return f"http://{shown}:{self.port}"


def look(router: RouterAddress) -> PoolView | None:
    """Return the pool's state, or None if the router does not answer."""
    try:
        ready = _get(router, "/ready")[0] == 200
        status, body = _get(router, "/pool")
        if status != 200:
            return None
        state = json.loads(body)
        return PoolView(
            ready=ready,
            requests=state["totals"]["requests_running"],
            nodes=tuple(_node(item) for item in state["nodes"]),
            chunks=_chunks(state["nodes"]),
        )
    except (OSError, http.client.HTTPException, ValueError, KeyError, msgspec.ValidationError):
        return None


def ask(router: RouterAddress, prompt: str) -> Answer:
    """Send one greedy, streamed chat request. Raise CommandError with the reason if it fails."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _answer_tokens(router),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    link = http.client.HTTPConnection(router.dial, router.port, timeout=ANSWER_TIMEOUT_S)
    start = time.monotonic()
    try:
        link.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        response = link.getresponse()
        if response.status != 200:
            raise CommandError(f"no answer: {_error_text(response)}")
        return _read_answer(response, start)
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"no answer: the router's connection broke ({error!r})") from error
    finally:
        link.close()


def _answer_tokens(router: RouterAddress) -> int:
    """ANSWER_TOKENS, or half of the model's context if that is less."""
    try:
        [model] = json.loads(_get(router, "/v1/models")[1])["data"]
        return max(1, min(ANSWER_TOKENS, int(model["max_model_len"]) // 2))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return ANSWER_TOKENS


def _get(router: RouterAddress, path: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {router.key}"} if router.key else {}
    link = http.client.HTTPConnection(router.dial, router.port, timeout=POLL_TIMEOUT_S)
    try:
        link.request("GET", path, headers=headers)
        response = link.getresponse()
        return response.status, response.read()
    finally:
        link.close()


def _node(item: dict[str, Any]) -> NodeView:
    load = item.get("load") or {}
    return NodeView(
        id=item["id"],
        role=item["role"],
        pid=item["pid"],
        state=item["state"],
        address=item["address"],
        requests=sum(load.get(key, 0) for key in ("running", "waiting", "parked")),
        exact=item["exact"],
    )


def _chunks(nodes: Sequence[dict[str, Any]]) -> str:
    """Describe the first node's chunks: nodes that exchange KV all have the same layout."""
    return chunk_line(msgspec.convert(nodes[0]["layout"], KVLayout)) if nodes else ""


def _read_answer(response: http.client.HTTPResponse, start: float) -> Answer:
    text, tokens, prompt_tokens, first = "", 0, 0, 0.0
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            placement = response.getheader("x-baton-placement") or "unknown"
            total = time.monotonic() - start
            return Answer(text, placement, first or total, total, tokens, prompt_tokens)
        if not data.startswith("{"):
            continue  # blank lines and SSE comments
        event = json.loads(data)
        if "error" in event:
            raise CommandError(f"no answer: {event['error'].get('message', data)}")
        for choice in event.get("choices") or ():
            text += choice["delta"].get("content") or ""
            first = first or (time.monotonic() - start if text else 0.0)
        usage = event.get("usage")
        if usage:
            tokens, prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
    raise CommandError("no answer: the stream ended before it was complete")


def _error_text(response: http.client.HTTPResponse) -> str:
    body = response.read().decode(errors="replace")
    try:
        return f"{json.loads(body)['error']['message']} (HTTP {response.status})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status}: {body[:200]}"
