"""One supervised child process: starts it, reads its output and restarts it when it dies.

In: a ChildSpec, and callbacks for output lines and exits. Out: a state for the live table. Each
child leads its own process group: a terminal's Ctrl-C reaches only the supervisor, and a kill
reaches the child together with its engine process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton_protocol.backoff import Backoff

TAIL_LINES = 40
LINE_BYTES = 64 << 10
READ_BYTES = 64 << 10
# Time to read a dead child's remaining output; a grandchild may keep the pipe open for longer.
DRAIN_OUTPUT_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 15.0  # before a restart

State = Literal["starting", "running", "waiting", "stopping", "ended"]


@dataclass(frozen=True)
class ChildSpec:
    """`name` is unique in the pool and, for nodes, the node's id. `variables` add to the
    environment that all children inherit; they may hold a password."""

    name: str
    role: str
    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)


class ChildProcess:
    """run() keeps the process alive until stop() or kill(). Not thread-safe."""

    def __init__(
        self,
        spec: ChildSpec,
        environment: Mapping[str, str],
        on_line: Callable[[str, str], None],
        on_end: Callable[[ChildProcess, int], None],
        backoff: Backoff | None = None,
    ) -> None:
        self.spec = spec
        self.state: State = "starting"
        self.pid = 0
        self.restarts = 0
        self.pause_s = 0.0  # between the last exit and the next start
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._environment = {**environment, **spec.variables}
        self._on_line = on_line
        self._on_end = on_end
        self._backoff = backoff or Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start, watch and restart the child; return when it has ended for good."""
        try:
            while not self._stopping.is_set():
                code = await self._live()
                if self._stopping.is_set():
                    break
                self.restarts += 1
                self.pause_s = self._backoff.next_pause_s()
                self.state = "waiting"
                self._on_end(self, code)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), self.pause_s)
        finally:
            self.kill()
            self.state = "ended"

    def served(self) -> None:
        """Reset the restart backoff: the child was seen serving."""
        self._backoff.reset()

    def last_words(self) -> str:
        """The last line of output since the latest start."""
        line = next((line for line in reversed(self.tail) if line), "it wrote nothing")
        return line.removeprefix("baton: ")

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, then SIGKILL after `timeout_s`; return when the process is gone."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        self.state = "stopping"
        if process.returncode is None:
            # Not process.terminate(): that polls, and may reap the child before asyncio does.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
        except TimeoutError:
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Send SIGKILL to the child's process group, and do not restart it."""
        self._stopping.set()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def _live(self) -> int:
        """Run the process once and return its exit code (negative: the signal that ended it)."""
        self.state = "starting"
        self.tail.clear()
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment,
            process_group=0,
        )
        process = self._process
        assert process.stdout is not None
        self.pid = process.pid
        self.state = "running"
        if self._stopping.is_set():
            self.kill()  # stop() was called while the process was starting, and found none
        reader = asyncio.create_task(self._read(process.stdout))
        try:
            code = await process.wait()
            # Processes left in its group (an engine) must not outlive the child.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader, DRAIN_OUTPUT_S)
        finally:
            reader.cancel()
            self.pid = 0
            if process.returncode is not None:
                self._process = None  # the kernel may reuse its pid
        return code

    async def _read(self, stream: asyncio.StreamReader) -> None:
        pending = b""
        while data := await stream.read(READ_BYTES):
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                self._line(line)
            if len(pending) > LINE_BYTES:
                self._line(pending)
                pending = b""
        if pending:
            self._line(pending)

    def _line(self, raw: bytes) -> None:
        text = raw.decode(errors="replace").rstrip()
        self.tail.append(text)
        self._on_line(self.spec.name, text)


def describe_end(code: int) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
