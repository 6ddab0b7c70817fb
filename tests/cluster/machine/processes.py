"""Processes of a cluster: started, killed and monitored by name.

In: a command, a folder for logs. Out: processes that log to NAME.log and die with this process,
even if it is killed. Each has MARK in its environment, by which `marked` finds it.
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
        # --pdeathsig kills a child when the *thread* that forked it ends, so one thread forks all.
        self._spawner = ThreadPoolExecutor(1)
        logs.mkdir(parents=True, exist_ok=True)

    def start(self, name: str, args: Sequence[str]) -> int:
        """Start a process; return its id. `name` may be used again after `stop`."""
        assert name not in self._running, f"{name} runs already"
        self._running[name] = self._spawner.submit(self._spawn, name, args).result()
        return self._running[name].pid

    def stop(self, name: str) -> None:
        """Kill a process and its children, and wait for its end. An unknown name is ignored."""
        process = self._running.pop(name, None)
        if process is None:
            return
        # A process in another PID namespace is a child of the nsenter that we started.
        for child in _children(process.pid):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait(END_S)

    def ended(self) -> list[str]:
        """The names of processes that ended without `stop`."""
        return [name for name, one in self._running.items() if one.poll() is not None]

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)
        self._spawner.shutdown()

    def log_tail(self, name: str) -> str:
        path = self._logs / f"{name}.log"
        return path.read_text(errors="replace")[-LOG_TAIL:] if path.exists() else ""

    def _spawn(self, name: str, args: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self._logs / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *args],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PATH": _search_path(), MARK: self._mark},
                start_new_session=True,
            )


def _search_path() -> str:
    """PATH with the folders of nft, runc and ip, which not every PATH has."""
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def _children(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []
    return children


def marked(mark: str) -> list[psutil.Process]:
    """All living processes with this mark, including those of other runs."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def kill_all(processes: Sequence[psutil.Process]) -> None:
    """Send SIGKILL and wait. psutil compares start times, so a reused process id is safe."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=END_S)
