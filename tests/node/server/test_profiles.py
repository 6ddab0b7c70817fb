"""The routes of profiles: a trace as the answer, and errors that say what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from baton_node.ipc.messages import Profiled, StartProfile, StopProfile, ToEngine
from baton_node.server import profiles
from baton_node.server.profiles import Profiles

pytestmark = pytest.mark.integration

Client = TestClient[web.Request, web.Application]


class FakeEngine:
    """Runs `runs` steps of each profile, and answers as the engine process does: at once if these
    are all, else when the profile is stopped."""

    def __init__(self) -> None:
        self.runs = 100
        self.error = ""
        self.frames: list[ToEngine] = []
        self.profiles = Profiles(self.send)

    def send(self, frame: ToEngine) -> None:
        self.frames.append(frame)
        if isinstance(frame, StartProfile) and (self.error or self.runs >= frame.steps):
            self.answer(frame, frame.steps)
        elif isinstance(frame, StopProfile):
            started = [each for each in self.frames if isinstance(each, StartProfile)][-1]
            self.answer(started, self.runs)

    def answer(self, frame: StartProfile, steps: int) -> None:
        if not self.error:
            Path(frame.path).write_bytes(b"trace")
        done = Profiled(frame.path, 0 if self.error else steps, self.error)
        asyncio.get_running_loop().call_soon(self.profiles.note, done)

    def leftovers(self) -> list[str]:
        paths = [frame.path for frame in self.frames if isinstance(frame, StartProfile)]
        return [path for path in paths if Path(path).exists()]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Client]:
    app = web.Application()
    app.router.add_post("/profile", engine.profiles.profile)
    app.router.add_post("/start_profile", engine.profiles.start)
    app.router.add_post("/stop_profile", engine.profiles.stop)
    async with TestClient(TestServer(app)) as client:
        yield client


async def ask(client: Client, path: str) -> tuple[int, str, str | None]:
    async with client.post(path) as answer:
        return answer.status, await answer.text(), answer.headers.get("X-Baton-Steps")


async def test_the_answer_is_the_trace_of_as_many_steps(client: Client, engine: FakeEngine) -> None:
    assert await ask(client, "/profile?steps=7") == (200, "trace", "7")
    assert await ask(client, "/profile") == (200, "trace", "10")
    assert engine.leftovers() == []


async def test_after_the_time_the_answer_has_the_steps_that_ran(
    client: Client, engine: FakeEngine
) -> None:
    engine.runs = 2
    assert await ask(client, "/profile?steps=7&timeout=0.1") == (200, "trace", "2")
    engine.runs = 0
    status, text, _ = await ask(client, "/profile?timeout=0.1")
    assert (status, text) == (409, "the node ran no step within 0.1 s: send it requests\n")
    assert engine.leftovers() == []


async def test_a_profile_can_be_started_and_stopped(
    client: Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "REFUSAL_S", 0.01)
    assert (await ask(client, "/stop_profile"))[0] == 409
    engine.runs = 5
    assert (await ask(client, "/start_profile"))[0] == 200
    assert engine.frames[-1] == StartProfile(profiles.MOST_STEPS, engine.leftovers()[0])
    assert (await ask(client, "/start_profile"))[0] == (await ask(client, "/profile"))[0] == 409
    assert await ask(client, "/stop_profile") == (200, "trace", "5")
    assert engine.leftovers() == []
    await ask(client, "/start_profile")
    assert len(engine.leftovers()) == 1
    engine.profiles.close()
    assert engine.leftovers() == []


async def test_a_refusal_of_the_engine_is_the_answer(client: Client, engine: FakeEngine) -> None:
    engine.error = "the simulated engine computes nothing"
    for path in ("/profile", "/start_profile"):
        assert await ask(client, path) == (409, f"{engine.error}\n", None)
    assert engine.leftovers() == []


@pytest.mark.parametrize("query", ["steps=0", "steps=101", "steps=x", "timeout=601", "steps=nan"])
async def test_numbers_out_of_bounds_are_refused(
    client: Client, engine: FakeEngine, query: str
) -> None:
    status, text, _ = await ask(client, f"/profile?{query}")
    assert status == 400
    assert text.startswith(query.partition("=")[0])
    assert engine.frames == []


async def test_the_file_of_a_profile_that_nobody_waits_for_is_removed(
    engine: FakeEngine, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    left.touch()
    engine.profiles.note(Profiled(str(left), 3))
    assert not left.exists()
