"""A pool as a user starts it: `baton up` in a separate process, on a free port.

In: flags of `up`. Out: its URL, its /pool and metrics. stop() checks that it exits with 0 and
leaves no process and no temporary file. Every wait is bounded, and a failure shows the end of the
pool's log.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

READY_TIMEOUT_S = 280.0
STOP_TIMEOUT_S = 180.0
HTTP_TIMEOUT_S = 120.0
# The time of ten load reports of a node (every 0.2 s). Counters of an idle pool that are unchanged
# for this time are final, even on a busy machine.
SETTLED_S = 2.0
GONE_S = 60.0  # limit for killed processes to disappear
LOG_TAIL = 6000
# Each process of a pool carries this variable, even after its parent has died.
MARK = "POOL_UNDER_TEST"

UP = (sys.executable, "-m", "baton_cli", "up", "--port", "0")
_READY = re.compile(r"^ready after \S+ s: (http://\S+)/v1 serves (\S+);", re.MULTILINE)
_METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


class Pool:
    """`with Pool(["--model", DIR, "--prefill", "1"]) as pool:` starts a pool, waits until it is
    ready, and stops it at the end."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.url = ""
        self.model = ""
        self._flags = list(flags)
        self._extra = dict(environment or {})
        self._ready_timeout_s = ready_timeout_s
        self._mark = uuid.uuid4().hex
        # A short path: the embedded store's sockets lie below it.
        self._home = Path(tempfile.mkdtemp(prefix="bp-", dir="/tmp"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Pool:
        if self._process is None:
            self.start()
        try:
            self.wait_ready()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is not None:
                error.add_note(f"the pool's log ends with:\n{self.log()[-LOG_TAIL:]}")
            elif self.running:
                self.stop()
        finally:
            self._discard()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the pool was not started"
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def temporary(self) -> Path:
        """The pool's TMPDIR."""
        return self._home / "t"

    def start(self) -> None:
        """Start the command without waiting. The pool dies with the calling thread, so a killed
        test run leaves no pool behind."""
        self.temporary.mkdir()
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("BATON_")}
        with open(self._home / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*UP, "--supervisor-pid", str(os.getpid()), *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**inherited, "TMPDIR": str(self.temporary), MARK: self._mark, **self._extra},
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait for the ready line, which gives the pool's URL; all its nodes are ready by then."""

        def ready() -> bool:
            if not self.running:
                raise AssertionError(self._describe(f"exited with {self.process.returncode}"))
            return _READY.search(self.log()) is not None

        self.wait(ready, "become ready", self._ready_timeout_s)
        match = _READY.search(self.log())
        assert match is not None
        self.url, self.model = match[1], match[2]

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = 180.0) -> None:
        """Poll until `condition` holds; after `timeout_s` raise AssertionError with the log."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(self._describe(f"did not {what} within {timeout_s:g} s"))
            time.sleep(0.02)

    def log(self) -> str:
        """The output of `baton up` and its children so far."""
        try:
            return (self._home / "log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def get(self, path: str) -> str:
        key = self._extra.get("BATON_ADMIN_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
            text: str = response.read().decode()
            return text

    def pool(self) -> dict[str, Any]:
        """The current answer of GET /pool."""
        state: dict[str, Any] = json.loads(self.get("/pool"))
        return state

    def totals(self) -> dict[str, int]:
        """Wait until the pool is idle and the nodes' reports are final; return /pool's totals."""
        before, since = self.pool(), time.monotonic()
        until = since + HTTP_TIMEOUT_S
        while time.monotonic() - since < SETTLED_S or _busy(before):
            if time.monotonic() > until:
                raise AssertionError(self._describe(f"is never idle: {before['nodes']}"))
            time.sleep(0.05)
            state = self.pool()
            if _busy(state) or state["totals"] != before["totals"]:
                before, since = state, time.monotonic()
        totals: dict[str, int] = before["totals"]
        return totals

    def metrics(self, name: str) -> dict[str, float]:
        """One metric of the router's /metrics: values by `node` label, "" without this label."""
        values = {}
        for metric, labels, value in _METRIC.findall(self.get("/metrics")):
            if metric == name:
                node = re.search(r'node="([^"]*)"', labels)
                values[node[1] if node else ""] = float(value)
        return values

    def processes(self) -> list[psutil.Process]:
        """All live processes of this pool, `baton up` included."""
        return [one for one in psutil.process_iter() if mark_of(one) == self._mark]

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send one signal, as Ctrl-C does, and check for exit code 0 and no leftovers."""
        self.process.send_signal(number)
        self.check_over()
        assert self.process.returncode == 0, self._describe(f"exited {self.process.returncode}")

    def check_over(self) -> None:
        """Wait until `baton up` has ended, and check that no process and no file is left."""
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self._describe("did not end")) from None
        deadline = time.monotonic() + GONE_S
        while left := self.processes():
            assert time.monotonic() < deadline, self._describe(f"left processes: {left}")
            time.sleep(0.02)
        # torch's empty cache of compiled code, which its import makes for all processes of a user.
        cache = f"torchinductor_{getpass.getuser()}"
        files = sorted(str(path) for path in self.temporary.rglob("*") if path.name != cache)
        assert files == [], self._describe(f"left files: {files}")

    def _describe(self, what: str) -> str:
        return (
            f"baton up {' '.join(self._flags)} {what}; its log ends with:\n{self.log()[-LOG_TAIL:]}"
        )

    def _discard(self) -> None:
        """Kill and remove everything that the pool left, also after a failure."""
        for one in self.processes():
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_S)
        shutil.rmtree(self._home, ignore_errors=True)


def _busy(state: dict[str, Any]) -> bool:
    return any(
        node["load"].get(key, 0)
        for node in state["nodes"]
        for key in ("running", "waiting", "parked")
    )


def mark_of(process: psutil.Process) -> str:
    """The mark of a live process, "" if it has none or cannot be read."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return str(process.environ().get(MARK, ""))
    except (psutil.Error, OSError):
        return ""  # the process has ended, or belongs to another user
