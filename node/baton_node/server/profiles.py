"""Profiles of a node's steps, for its admin.

    POST /profile?steps=N      profile the next N steps and answer with their trace
    POST /start_profile        begin a profile, as vLLM's route does
    POST /stop_profile         end it and answer with its trace

A trace is gzipped JSON of torch.profiler, which https://ui.perfetto.dev shows. In: requests, and
the engine's Profiled frames. Out: StartProfile and StopProfile for the engine; traces.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from baton_node.ipc.messages import Profiled, StartProfile, StopProfile, ToEngine

MOST_STEPS = 100
STEPS = 10
WAIT_S, LEAST_WAIT_S, MOST_WAIT_S = 60.0, 0.1, 600.0
REFUSAL_S = 1.0  # in which the engine refuses a profile
WRITE_S = 120.0  # longest wait for the trace's file


@dataclass(slots=True)
class _Running:
    path: Path
    done: asyncio.Future[Profiled]


class Profiles:
    """The profile of one node, at most one at a time. Belongs to the server's event loop."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._running: _Running | None = None

    def note(self, frame: Profiled) -> None:
        """The engine has ended a profile, or refused one."""
        running = self._running
        if running is None or str(running.path) != frame.path:
            Path(frame.path).unlink(missing_ok=True)
        elif not running.done.done():
            running.done.set_result(frame)

    def close(self) -> None:
        """The node ends: remove the file of a profile that was started and not stopped."""
        if self._running is not None:
            self._running.path.unlink(missing_ok=True)

    async def profile(self, request: web.Request) -> web.Response:
        steps = int(_number(request, "steps", STEPS, 1, MOST_STEPS))
        wait_s = _number(request, "timeout", WAIT_S, LEAST_WAIT_S, MOST_WAIT_S)
        running = self._begin(steps)
        return await self._answer(running, wait_s)

    async def start(self, request: web.Request) -> web.Response:
        running = self._begin(int(_number(request, "steps", MOST_STEPS, 1, MOST_STEPS)))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFUSAL_S):
                refused = await asyncio.shield(running.done)
                if refused.error:
                    self._end(running)
                    raise web.HTTPConflict(text=f"{refused.error}\n")
        return web.Response(text="profiling; POST /stop_profile ends it and returns the trace\n")

    async def stop(self, request: web.Request) -> web.Response:
        running = self._running
        if running is None:
            raise web.HTTPConflict(text="no profile is being made; POST /start_profile first\n")
        return await self._answer(running, 0.0)

    def _begin(self, steps: int) -> _Running:
        if self._running is not None:
            raise web.HTTPConflict(text="a profile is being made; POST /stop_profile ends it\n")
        handle, name = tempfile.mkstemp(prefix="baton-profile-", suffix=".json.gz")
        os.close(handle)
        self._running = _Running(Path(name), asyncio.get_running_loop().create_future())
        self._send(StartProfile(steps, name))
        return self._running

    async def _answer(self, running: _Running, wait_s: float) -> web.Response:
        """Wait for the steps, then end the profile, and answer with what it has."""
        try:
            await asyncio.wait([running.done], timeout=wait_s)
            if not running.done.done():
                self._send(StopProfile())
                await asyncio.wait([running.done], timeout=WRITE_S)
            if not running.done.done():
                raise web.HTTPGatewayTimeout(text=f"no trace within {WRITE_S:g} s\n")
            found = running.done.result()
            if found.error:
                raise web.HTTPConflict(text=f"{found.error}\n")
            if not found.steps:
                raise web.HTTPConflict(
                    text=f"the node ran no step within {wait_s:g} s: send it requests\n"
                )
            data = await asyncio.to_thread(running.path.read_bytes)
        finally:
            self._end(running)
        return web.Response(
            body=data,
            content_type="application/gzip",
            headers={
                "X-Baton-Steps": str(found.steps),
                "Content-Disposition": 'attachment; filename="profile.json.gz"',
            },
        )

    def _end(self, running: _Running) -> None:
        """Give the profile up, and its file. After a client left, the engine ends it, too."""
        if self._running is running:
            self._running = None
            if not running.done.done():
                self._send(StopProfile())
            running.path.unlink(missing_ok=True)


def _number(request: web.Request, name: str, default: float, least: float, most: float) -> float:
    text = request.query.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not least <= value <= most:
        bounds = f"from {least:g} to {most:g}"
        raise web.HTTPBadRequest(text=f"{name} is {text!r}; it must be {bounds}\n")
    return value
