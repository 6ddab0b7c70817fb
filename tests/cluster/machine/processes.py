"""Processes of a cluster: started, killed and looked after by name.

In: words of a command, a folder for logs. Out: processes that write to NAME.log and die with this
one, even if it is killed. Each carries MARK in its environment, by which `marked` finds it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "CLUSTER_UNDER_TEST"
END_S = 120.0
LOG_TAIL = 2000


class Processes:
    def __init__(self, logs: Path, mark: str) -> None:
        self._logs = logs
        self._mark = mark
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # The kernel ends a child with the *thread* that forked it; this one lives long enough.
        self._spawner = ThreadPoolExecutor(1)
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, words: Sequence[str]) -> int:
        """The process id. `name` may be used again after `stop`."""
        assert name not in self._running, f"{name} runs already"
        self._running[name] = self._spawner.submit(self._spawn, name, words).result()
        return self._running[name].pid

    def stop(self, name: str) -> None:
        """SIGKILL to it and to its children; returns when it is dead. Nothing where it is not."""
        process = self._running.pop(name, None)
        if process is None:
            return
        # What runs in another process namespace is a child of the nsenter that we started.
        for child in _children(process.pid):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait(END_S)

    def ended(self) -> list[str]:
        """Those that ended without being told to."""
        return [name for name, one in self._running.items() if one.poll() is not None]

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)
        self._spawner.shutdown()

    def log_tail(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return path.read_text(errors="replace")[-LOG_TAIL:] if path.exists() else ""

    def _spawn(self, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self._logs / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": _search_path(), MARK: self._mark},
                start_new_session=True,
            )


def _search_path() -> str:
    """Where nft, runc and ip are: not all users' PATH says so, root's by `env -i` for one."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def _children(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return children


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry the mark, whoever started them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """SIGKILL, and wait. psutil compares start times: a process id used again is left alone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=END_S)
