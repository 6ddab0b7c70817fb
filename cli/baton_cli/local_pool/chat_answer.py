"""One streamed chat request, with its timings: the question of `baton up --once`.

In: the router's address, a prompt. Out: the answer's text, its placement and its times.
"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass

from baton_cli.errors import CommandError
from baton_cli.local_pool.router_client import RouterAddress, get_page

ANSWER_TIMEOUT_S = 600.0
ANSWER_TOKENS = 256


@dataclass(frozen=True)
class ChatAnswer:
    """One chat answer. Times are in seconds; `tokens` counts the completion's tokens."""

    text: str
    placement: str
    first_token_s: float
    total_s: float
    tokens: int
    prompt_tokens: int


def ask(router: RouterAddress, prompt: str) -> ChatAnswer:
    """Send one greedy, streamed chat request. Raise CommandError with the reason if it fails."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _answer_tokens(router),
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    link = router.connection(ANSWER_TIMEOUT_S)
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
        model, *_ = json.loads(get_page(router, "/v1/models")[1])["data"]
        return max(1, min(ANSWER_TOKENS, int(model["max_model_len"]) // 2))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return ANSWER_TOKENS


def _read_answer(response: http.client.HTTPResponse, start: float) -> ChatAnswer:
    text, tokens, prompt_tokens, first = "", 0, 0, 0.0
    for line in response:
        data = line.decode().strip().removeprefix("data:").strip()
        if data == "[DONE]":
            placement = response.getheader("x-baton-placement") or "unknown"
            total = time.monotonic() - start
            return ChatAnswer(text, placement, first or total, total, tokens, prompt_tokens)
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
