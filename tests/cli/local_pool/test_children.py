"""A supervised process: its output, restarts with backoff, and an end without left-overs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from baton_cli.local_pool.children import ChildProcess, ChildSpec, describe_end
from baton_protocol.backoff import Backoff
from tests.support.waiting import until

pytestmark = pytest.mark.integration

WAIT_S = 180.0
SLEEP_FOREVER = "import time; print('up', flush=True); time.sleep(600)"
IGNORE_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP_FOREVER}"


@dataclass
class Events:
    lines: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    last_words: list[str] = field(default_factory=list)

    def line(self, name: str, text: str) -> None:
        self.lines.append(f"{name}: {text}")

    def end(self, child: ChildProcess, code: int) -> None:
        self.ends.append(code)
        self.last_words.append(child.last_words())


def make_child(script: str, events: Events, first_s: float = 0.01) -> ChildProcess:
    spec = ChildSpec("kid", "decode", (sys.executable, "-c", script))
    return ChildProcess(spec, os.environ, events.line, events.end, Backoff(first_s, 15.0))


async def test_output_is_forwarded_by_line_even_if_long_or_unfinished() -> None:
    events = Events()
    child = make_child("print('one'); print('x' * 200000); print('last', end='')", events, 600)
    running = asyncio.create_task(child.run())
    await until(lambda: bool(events.ends))
    await child.stop(WAIT_S)
    await running
    assert events.lines[0] == "kid: one"
    assert sum(line.count("x") for line in events.lines) == 200000
    assert events.lines[-1] == "kid: last"


async def test_a_dead_child_is_restarted() -> None:
    events = Events()
    child = make_child("raise SystemExit(7)", events)
    running = asyncio.create_task(child.run())
    await until(lambda: len(events.ends) >= 3)
    await child.stop(WAIT_S)
    await running
    assert set(events.ends) == {7}
    assert child.restarts == len(events.ends)
    assert child.state == "ended"


async def test_a_killed_child_is_restarted_under_another_pid() -> None:
    events = Events()
    child = make_child(SLEEP_FOREVER, events)
    running = asyncio.create_task(child.run())
    await until(lambda: events.lines == ["kid: up"])
    first = child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(events.lines) == 2)
    assert events.ends == [-signal.SIGKILL]
    assert child.pid != first
    child.kill()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_child_that_ignores_sigterm_is_killed_after_the_timeout() -> None:
    events = Events()
    child = make_child(IGNORE_SIGTERM, events)
    running = asyncio.create_task(child.run())
    await until(lambda: events.lines == ["kid: up"])
    await child.stop(0.05)
    await asyncio.wait_for(running, WAIT_S)
    assert child.pid == 0


async def test_a_kill_reaches_the_child_s_own_children() -> None:
    events = Events()
    script = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    child = make_child(script, events)
    running = asyncio.create_task(child.run())
    await until(lambda: bool(events.lines))
    grandchild = psutil.Process(int(events.lines[0].removeprefix("kid: ")))
    child.kill()
    await asyncio.wait_for(running, WAIT_S)
    await until(lambda: not grandchild.is_running() or grandchild.status() == "zombie")


async def test_a_child_that_was_never_started_stops_at_once() -> None:
    child = make_child(SLEEP_FOREVER, Events())
    await child.stop(WAIT_S)
    await asyncio.wait_for(child.run(), WAIT_S)
    assert child.state == "ended"


async def test_a_stop_during_the_backoff_ends_the_wait() -> None:
    events = Events()
    child = make_child("raise SystemExit(1)", events, first_s=600)
    running = asyncio.create_task(child.run())
    await until(lambda: child.state == "waiting")
    await child.stop(WAIT_S)
    await asyncio.wait_for(running, WAIT_S)


async def test_a_child_that_served_is_restarted_with_the_first_wait_each_time() -> None:
    events = Events()
    child = make_child(SLEEP_FOREVER, events)
    running = asyncio.create_task(child.run())
    for _ in range(3):
        await until(lambda: len(events.lines) > len(events.ends))
        child.served()
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: len(events.ends) == len(events.lines))
        assert child.pause_s == 0.01
    child.kill()
    await asyncio.wait_for(running, WAIT_S)


async def test_a_frozen_child_is_killed_after_the_timeout() -> None:
    events = Events()
    child = make_child(SLEEP_FOREVER, events)
    running = asyncio.create_task(child.run())
    await until(lambda: events.lines == ["kid: up"])
    os.kill(child.pid, signal.SIGSTOP)
    await child.stop(0.05)
    await asyncio.wait_for(running, WAIT_S)
    assert child.pid == 0


async def test_last_words_come_from_the_last_run_only(tmp_path: Path) -> None:
    mark, events = tmp_path / "mark", Events()
    script = (
        f"import os, sys\nif os.path.exists({str(mark)!r}): sys.exit(1)\n"
        f"open({str(mark)!r}, 'w').close(); sys.exit('baton: no room')"
    )
    child = make_child(script, events)
    running = asyncio.create_task(child.run())
    await until(lambda: len(events.ends) >= 2)
    child.kill()
    await asyncio.wait_for(running, WAIT_S)
    assert events.last_words[:2] == ["no room", "it wrote nothing"]


@pytest.mark.parametrize(
    ("code", "description"),
    [
        (0, "exited with code 0"),
        (1, "exited with code 1"),
        (-9, "was ended by SIGKILL"),
        (-200, "was ended by signal 200"),
    ],
)
def test_an_exit_code_is_described_in_words(code: int, description: str) -> None:
    assert describe_end(code) == description
