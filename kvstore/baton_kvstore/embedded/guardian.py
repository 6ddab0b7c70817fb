"""The guardian process: restarts embedded redis-servers, and cleans up when its owner is gone.

It is a separate process because an owner killed with SIGKILL cannot clean up. A parent-death signal
alone would leave the directory behind, and fires when the *thread* that forked ends. The guardian's
stdin is a pipe whose other end only the owner holds: end of file means that the owner is gone, for
whatever reason. So it is not the supervisor of `baton up`, which ends with its pool: the guardian
outlives its owner, to clean up. It imports only what starts in 20 ms.

Its arguments are the owner's pid and a private directory. `servers.json` in that directory holds
each server's name and command line. They are not in argv, so that a search for a server's process
by name or socket does not find the guardian.

It writes `<name>.pid` for each server, and `<name>.failed` for a server that refuses its settings
at its first start. If a server ends later, the guardian writes its pid and exit status to
`<name>.ended` and restarts it after a pause. The restarted server is empty; its new run id shows
that its former content is gone. When the owner is gone, the guardian kills the servers and removes
the directory.
"""

from __future__ import annotations

import functools
import json
import os
import select
import shutil
import signal
import subprocess
import time

from baton_protocol.backoff import Backoff
from baton_protocol.parent_death import die_with

POLL_S = 0.1
STOP_S = 2.0
STEADY_S = 1.0  # a server that runs for this long counts as up, which resets its pause
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # before a restart
SERVERS = "servers.json"


class GuardedServer:
    """One redis-server process, restarted when it ends."""

    def __init__(self, folder: str, name: str, command: list[str]) -> None:
        self._folder, self._name, self._command = folder, name, command
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._restart_at = 0.0
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._was_up = False

    def start(self) -> None:
        self._started = time.monotonic()
        # This process has one thread, so running code between fork and exec is safe.
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )
        self._write("pid", str(self._process.pid))

    def supervise(self) -> None:
        """Detect that the server has ended, and restart it when its pause is over."""
        now = time.monotonic()
        if self._process is None:
            if self._was_up and now >= self._restart_at:
                self.start()
            return
        status = self._process.poll()
        if status is None:
            if now - self._started >= STEADY_S:
                self._was_up = True
                self._backoff.reset()
            return
        pid, self._process = self._process.pid, None
        if status == 1 and not self._was_up:  # it refused its settings, and would do so again
            self._write("failed", str(status))
            return
        self._write("ended", f"{pid} {status}")
        self._was_up = True
        self._restart_at = now + self._backoff.next_pause_s()

    def kill(self) -> None:
        """Send SIGKILL: a cache has nothing to save, and SIGTERM waits for the server's next
        tick."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def is_gone(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _write(self, kind: str, text: str) -> None:
        path = os.path.join(self._folder, f"{self._name}.{kind}")
        with open(path + ".new", "w", encoding="ascii") as file:
            file.write(text)
        os.replace(path + ".new", path)


def _owner_is_gone(owner: int) -> bool:
    readable, _, _ = select.select([0], [], [], POLL_S)
    return (bool(readable) and not os.read(0, 1)) or os.getppid() != owner


def _finish(servers: list[GuardedServer], folder: str) -> None:
    for server in servers:
        server.kill()
    until = time.monotonic() + STOP_S
    while not all(server.is_gone() for server in servers) and time.monotonic() < until:
        time.sleep(0.002)
    shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str]) -> int:
    owner, folder = int(argv[1]), argv[2]
    with open(os.path.join(folder, SERVERS), encoding="utf-8") as file:
        commands = json.load(file)
    servers = [GuardedServer(folder, name, command) for name, command in commands.items()]
    ended: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: ended.append(number))
    try:
        for server in servers:
            server.start()
        while not ended and not _owner_is_gone(owner):
            for server in servers:
                server.supervise()
    finally:
        _finish(servers, folder)
    return 0
