"""Keeps embedded redis-servers alive while their owner lives, and leaves nothing when it does not.

A process of its own, run by path with only the standard library: a supervisor that is killed with
SIGKILL can clean nothing up, and a parent-death signal alone would leave the directory (and goes
off when the *thread* that forked ends). Its stdin is a pipe whose other end only the owner holds:
end of file means that the owner is gone, however it went.

In (argv): owner's pid, private directory; `servers.json` there holds each server's name and command
line. They are not in argv, so that whoever looks for a server by its name or socket finds that
server and not the guardian of all.

Out: `<name>.pid` in the directory, and, for a server that ends before it was ever up,
`<name>.failed`. A server that dies later leaves its pid and exit status in `<name>.ended`, and is
started again alone after a pause (empty: its new run id tells everybody that what it held is gone).
At the end the servers are dead and the directory is removed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

POLL_S = 0.1
STOP_S = 2.0
STEADY_S = 1.0  # a server that ends sooner than this after its start never came up
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
PR_SET_PDEATHSIG = 1
SERVERS = "servers.json"


def die_with(parent: int) -> None:
    """Ask Linux to kill this process when the thread that forked it ends. Elsewhere: nothing.
    A parent that has ended already sends no signal: then this process ends itself."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class GuardedServer:
    """One server that is kept alive."""

    def __init__(self, folder: str, name: str, command: list[str]) -> None:
        self._folder, self._name, self._command = folder, name, command
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._restart_at = 0.0
        self._pause = FIRST_PAUSE_S
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

    def look_after(self) -> None:
        """Notice its death; start it again when its pause is over."""
        now = time.monotonic()
        if self._process is None:
            if self._was_up and now >= self._restart_at:
                self.start()
            return
        status = self._process.poll()
        if status is None:
            if now - self._started >= STEADY_S:
                self._was_up, self._pause = True, FIRST_PAUSE_S
            return
        pid, self._process = self._process.pid, None
        if status == 1 and not self._was_up:  # it refused its settings, and would again
            self._write("failed", str(status))
            return
        self._write("ended", f"{pid} {status}")
        self._was_up = True
        self._restart_at = now + self._pause
        self._pause = min(LONGEST_PAUSE_S, 2 * self._pause)

    def kill(self) -> None:
        """At once: a cache has nothing to save, and SIGTERM waits for the server's next tick."""
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


def _finish(wards: list[GuardedServer], folder: str) -> None:
    for ward in wards:
        ward.kill()
    until = time.monotonic() + STOP_S
    while not all(ward.is_gone() for ward in wards) and time.monotonic() < until:
        time.sleep(0.002)
    shutil.rmtree(folder, ignore_errors=True)


def main(argv: list[str]) -> int:
    owner, folder = int(argv[1]), argv[2]
    with open(os.path.join(folder, SERVERS), encoding="utf-8") as file:
        wards = [GuardedServer(folder, name, command) for name, command in json.load(file).items()]
    ended: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner decides about Ctrl-C
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: ended.append(number))
    try:
        for ward in wards:
            ward.start()
        while not ended and not _owner_is_gone(owner):
            for ward in wards:
                ward.look_after()
    finally:
        _finish(wards, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
