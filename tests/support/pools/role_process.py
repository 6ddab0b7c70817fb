"""One role of a pool as a process that a test starts, kills, freezes and restarts.

In: the arguments of its command. Out: a process group (a node's server and its engine) that keeps
its name and port across restarts. Only the test restarts it. It dies with the thread that started
it (--supervisor-pid), so a killed test run leaves no process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from baton_cli.commands.up import reserve_port
from tests.support.pools.baton_up import MARK
from tests.support.wires.wire import WireLoop

END_S = 120.0
LOG_TAIL = 3000


class RoleProcess:
    """One process. `start()` may be called again after it has ended; `environment` extends the
    test's own."""

    def __init__(
        self, loop: WireLoop, name: str, words: Sequence[str], folder: Path, mark: str
    ) -> None:
        self.name = name
        self.starts = 0
        self._loop = loop
        self._mark = mark
        self._held_port = reserve_port("127.0.0.1", 0)
        self.port: int = self._held_port.getsockname()[1]
        self.words = [*words, f"--port={self.port}"]
        self.environment: dict[str, str] = {}
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        assert not self.alive, f"{self.name} runs already"
        end = f"--supervisor-pid={os.getpid()}"
        command = [sys.executable, "-m", "baton_cli", *self.words, end]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        environment = {**inherited, MARK: self._mark, **self.environment}

        def spawn() -> subprocess.Popen[bytes]:
            with open(self._log, "ab") as log:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                )

        # The kernel kills the child when the *thread* that forked it ends; the loop's lives on.
        self._process = self._loop.call(spawn)
        self.starts += 1

    def kill(self) -> None:
        """Send SIGKILL to server and engine, and return when the server is dead."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(END_S)

    def end(self) -> None:
        """Send SIGTERM to the server, as Kubernetes does, without waiting for its end."""
        if self._process is not None:
            self._process.terminate()

    def kill_engine(self) -> None:
        for engine in self._engines():
            engine.kill()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def freeze_engine(self) -> None:
        for engine in self._engines():
            engine.suspend()

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self._held_port.close()

    def log_text(self) -> str:
        """The output on stdout and stderr of all its starts."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def log_tail(self) -> str:
        if not self._log.exists():
            return ""
        return f"--- {self.name}:\n{self._log.read_text(errors='replace')[-LOG_TAIL:]}"

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            # Signal the group: the server may be dead while its engine lives.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _engines(self) -> list[psutil.Process]:
        try:
            engines: list[psutil.Process] = psutil.Process(self.pid).children()
        except psutil.NoSuchProcess:
            return []
        return engines
