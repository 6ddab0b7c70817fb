"""A server that answers at once, or a token every so often: what a router that forwards needs.

    python benchmarks/support/router/mock_backend.py PORT DELAY_MS

In: POST /v1/completions. Out: as many events as tokens were asked for, each written by itself, in
the form that a Baton router gives them; to the user SLOW_USER one each second. Any GET says that
all is well.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

HOST = "127.0.0.1"
MODEL = "mock"
DONE = b"data: [DONE]\n\n"
SLOW_USER, SLOW_S = "slow", 1.0


def event(index: int, count: int) -> bytes:
    finish = "length" if index == count - 1 else None
    choice = {"index": 0, "text": " so", "logprobs": None, "finish_reason": finish}
    chunk = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": MODEL}
    return b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n"


class Backend:
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count = body["max_tokens"]
        delay_s = SLOW_S if body.get("user") == SLOW_USER else self._delay_s
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index in range(count):
            if delay_s:
                await asyncio.sleep(delay_s)
            await response.write(event(index, count))
        await response.write(DONE)
        await response.write_eof()
        return response

    async def fine(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL}
        )


def main() -> None:
    port, delay_ms = int(sys.argv[1]), float(sys.argv[2])
    backend = Backend(delay_ms / 1e3)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", backend.complete)
    app.router.add_get("/{path:.*}", backend.fine)
    web.run_app(app, host=HOST, port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
