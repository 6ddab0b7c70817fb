"""Several routers on one port: a parent process that supervises the workers.

In: the number of workers, the command of one, and signals. Out: processes that listen on the same
port (SO_REUSEPORT: the kernel distributes connections), and each on a unix socket in a private
folder, for its siblings (see `peers`). Each worker is a complete router, so a crash costs only its
own requests. The parent restarts a worker that ends unexpectedly, with growing pauses. The first
signal drains all workers, the second ends them at once; the parent ends when all have ended.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from baton_router.errors import ListenError, StartError

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 10.0
STEADY_S = 10.0  # a worker that lived this long restarts after the first pause
POLL_S = 0.02
FIRST_WORKER = "0"
SIGNALS = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """Settings of the workers. `command` makes a worker's argv from its unix socket and the port.
    `environment` is given to each. `port` 0 takes a free port."""

    pool: str
    host: str
    port: int
    workers: int
    command: Callable[[Path, int], Sequence[str]]
    environment: Mapping[str, str]


class Worker:
    """The slot of one worker process. `ends` counts the unexpected ends of its process."""

    def __init__(
        self,
        path: Path,
        argv: Sequence[str],
        environment: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.ends = 0
        self._argv = argv
        self._environment = environment
        self._clock = clock
        self._pause_s = FIRST_PAUSE_S
        self._process: asyncio.subprocess.Process | None = None

    @property
    def listens(self) -> bool:
        return self.path.exists()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def send_signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until the process has ended after `stopping`. Raise StartError if it fails before it
        ever listened, because a restart would not help."""
        listened = False
        while not stopping.is_set():
            began = self._clock()
            code = await self._live()
            listened = listened or self.listens
            if stopping.is_set():
                return
            if not listened and code > 0:
                raise StartError(
                    f"worker {self.path.stem} {_outcome(code)}; see its log line for the cause"
                )
            await self._pause(code, self._clock() - began, stopping)

    async def _live(self) -> int:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.DEVNULL,
            env=dict(self._environment),
            start_new_session=True,  # Ctrl-C reaches only the parent, which passes it on once
        )
        try:
            return await self._process.wait()
        except asyncio.CancelledError:
            self.send_signal(signal.SIGKILL)
            await self._process.wait()
            raise

    async def _pause(self, code: int, lived_s: float, stopping: asyncio.Event) -> None:
        self.ends += 1
        if lived_s >= STEADY_S:
            self._pause_s = FIRST_PAUSE_S
        logger.warning(
            "worker %s %s after %.1f s; restarting it in %.1f s",
            *(self.path.stem, _outcome(code), lived_s, self._pause_s),
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(self._pause_s):
                await stopping.wait()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)


async def serve_workers(pool: WorkerPool) -> None:
    """Serve until a signal. Raise ListenError, or StartError if a worker cannot start."""
    with (
        _reserve(pool.host, pool.port) as held,
        tempfile.TemporaryDirectory(prefix="baton-router-") as folder,
    ):
        port = held.getsockname()[1]
        paths = [Path(folder) / f"{number}.sock" for number in range(pool.workers)]
        workers = [Worker(path, pool.command(path, port), pool.environment) for path in paths]
        stopping = asyncio.Event()
        with _signals(workers, stopping):
            try:
                async with asyncio.TaskGroup() as group:
                    for worker in workers:
                        group.create_task(worker.run(stopping))
                    group.create_task(_say_ready(pool, port, workers, stopping))
            except* StartError as errors:
                raise StartError(str(errors.exceptions[0])) from errors


async def _say_ready(
    pool: WorkerPool, port: int, workers: Sequence[Worker], stopping: asyncio.Event
) -> None:
    """Log the address once, when all workers listen."""
    while not all(worker.listens for worker in workers):
        if stopping.is_set():
            return
        await asyncio.sleep(POLL_S)
    logger.info(
        "router of pool %r listens on http://%s:%d with %d workers",
        *(pool.pool, pool.host, port, len(workers)),
    )


@contextmanager
def _signals(workers: Sequence[Worker], stopping: asyncio.Event) -> Iterator[None]:
    """Pass each signal on to the workers, which count them themselves."""

    def signalled() -> None:
        stopping.set()
        for worker in workers:
            worker.send_signal(signal.SIGTERM)

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, signalled)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _reserve(host: str, port: int) -> socket.socket:
    """A socket that is bound but never listens, to hold the port while workers come and go."""
    held = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(address)
    except OSError as error:
        if held is not None:
            held.close()
        raise ListenError(host, port, error) from error
    return held


def _outcome(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
