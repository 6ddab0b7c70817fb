"""Runs one role in a process as a pod does: configured by variables, ended by SIGTERM.

In: the arguments of its command and BATON_ variables. Out: its address, read from its log, which
the caller may keep; and a check that it exits with 0.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 200.0
# Kubernetes' variables in a namespace with services `baton`, `baton-router` and `baton-node`.
KUBERNETES = {
    "BATON_PORT": "tcp://10.0.0.1:8000",
    "BATON_SERVICE_HOST": "10.0.0.1",
    "BATON_ROUTER_SERVICE_PORT_HTTP": "80",
    "BATON_ROUTER_PORT": "tcp://10.0.0.2:80",
    "BATON_NODE_PORT_80_TCP": "tcp://10.0.0.3:80",
}


@contextmanager
def role(
    *arguments: str, log: list[str] | None = None, pids: list[int] | None = None, **variables: str
) -> Iterator[str]:
    """Yield a role's address; then send SIGTERM and check for exit code 0. `log` receives its
    stderr lines, `pids` its process id."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "baton_cli", *arguments],
        env={**inherited, **KUBERNETES, **variables},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if pids is not None:
        pids.append(process.pid)
    watchdog = threading.Timer(WAIT_S, process.kill)
    watchdog.start()
    assert process.stderr is not None
    try:
        seen: list[str] = [] if log is None else log
        for line in process.stderr:
            seen.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise AssertionError(f"{arguments} ended early: {''.join(seen)}")
        yield found[0]
        process.send_signal(signal.SIGTERM)
        seen += process.stderr
        assert process.wait(WAIT_S) == 0, "".join(seen)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(WAIT_S)
        process.stderr.close()


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=WAIT_S):
                return
        except urllib.error.HTTPError as response:
            response.close()
            time.sleep(0.05)
    raise AssertionError(f"{url} never became ready")
