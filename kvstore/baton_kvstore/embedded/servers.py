"""Embedded Redis servers for one machine: index and data, on unix sockets.

The servers answer at their URLs when start() returns. Nothing is left after stop(), or after the
owner was killed (see `guardian`). The sockets are in a private directory (0700) with a short path,
since a socket's path may have at most 107 bytes. There is no persistence: the store is a cache.

Settings that only newer servers know are set with CONFIG SET after the start; a refusal is ignored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import baton_kvstore
import baton_protocol
from baton_kvstore.connection.endpoint import parse_endpoint
from baton_kvstore.connection.resp_connection import RespConnection
from baton_kvstore.connection.server_settings import (
    INDEX_MEMORY,
    REPLIES_BYTES,
    clients_limit,
)
from baton_kvstore.embedded import guardian
from baton_kvstore.embedded.redis_binary import find_redis_server
from baton_kvstore.errors import ServerFailed, ServerRefused, StoreUnavailable
from baton_kvstore.settings import StoreSettings
from baton_protocol.layout import CHUNK_MOST_BYTES

logger = logging.getLogger(__name__)
DEFAULT_STORE_MEMORY = 1 << 30
LONGEST_SOCKET_PATH = 99
START_S = 10.0
STOP_S = 6.0
# The guardian finds only the packages that it imports: it runs without site packages.
_GUARDIAN_MAIN = """
import sys
sys.path += sys.argv[3:]
from baton_kvstore.embedded.guardian import main
sys.exit(main(sys.argv))
"""
_GUARDIAN_ROOTS = (
    str(Path(baton_kvstore.__file__).parent.parent),
    str(Path(baton_protocol.__file__).parent.parent),
)


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """One server. `name` also names its socket; `maxmemory` is in bytes; `policy` is Redis'
    eviction policy; `options` are further arguments of redis-server."""

    name: str
    maxmemory: int
    policy: str
    options: tuple[str, ...] = ()


def optional_settings(maxmemory: int, policy: str) -> dict[str, str]:
    """Return the settings that only some versions of Redis know."""
    value_bytes = 0 if policy == "noeviction" else CHUNK_MOST_BYTES  # an index holds no chunks
    return {
        # Without these two, clients that do not read their replies make the server evict data. If
        # values are larger than CHUNK_MOST_BYTES, a node, which knows their size, raises both
        # limits (`server_settings`).
        "client-output-buffer-limit": f"normal {REPLIES_BYTES} 0 0",
        "maxmemory-clients": clients_limit(maxmemory, value_bytes),
        "maxmemory-samples": "10",
    }


class EmbeddedServers:
    """Redis servers that run until stop(), or until the process that started them ends."""

    def __init__(
        self,
        specs: Sequence[ServerSpec],
        *,
        binary: Path | None = None,
        root: Path | None = None,
    ) -> None:
        self._specs = tuple(specs)
        self._binary = binary
        self._root = root
        self._folder: Path | None = None
        self._guardian: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EmbeddedServers:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def folder(self) -> Path:
        """The private directory. Raise ServerFailed unless between start() and stop()."""
        if self._folder is None:
            raise ServerFailed("the embedded store is not running")
        return self._folder

    def url(self, name: str) -> str:
        return f"unix://{self.folder / name}.sock"

    def pid(self, name: str) -> int:
        """Return a server's process id, which changes with each restart."""
        return int((self.folder / f"{name}.pid").read_text())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self._specs)

    def last_end(self, name: str) -> tuple[int, int] | None:
        """Return pid and exit status (negative: the signal) of a server's last end, None if it
        never ended. The guardian restarts it."""
        try:
            pid, status = (self.folder / f"{name}.ended").read_text().split()
        except FileNotFoundError:
            return None
        return int(pid), int(status)

    @property
    def is_alive(self) -> bool:
        """Whether the guardian runs. The guardian restarts servers, but only revive() restarts the
        guardian."""
        return self._guardian is not None and self._guardian.poll() is None

    def start(self) -> None:
        """Start the servers and wait until each answers (about 50 ms). Raise ServerMissing or
        ServerFailed."""
        if self._guardian is not None:
            raise ServerFailed("the embedded store was started twice")
        binary = self._binary or find_redis_server()
        self._folder = _private_folder(self._root, max(len(spec.name) for spec in self._specs))
        try:
            self._guardian = self._start_guardian(binary)
            until = time.monotonic() + START_S
            for spec in self._specs:
                self._await_server(spec, until)
        except BaseException:
            self.stop()
            raise

    def revive(self) -> None:
        """Restart a guardian that was killed; no effect while it runs.

        Its servers died with it. They come back empty, at the same addresses. Does not wait for
        them.
        """
        if self._guardian is not None and not self.is_alive:
            self._close_pipe(self._guardian)
            self._guardian = self._start_guardian(self._binary or find_redis_server())

    def stop(self) -> None:
        """End the servers and remove the directory. Idempotent."""
        process, self._guardian = self._guardian, None
        folder, self._folder = self._folder, None
        if process is not None:
            self._close_pipe(process)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                logger.error("the guardian of %s did not end in %.0f s", folder, STOP_S)
                process.kill()
                process.wait(STOP_S)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)  # if the guardian was killed

    @staticmethod
    def _close_pipe(process: subprocess.Popen[bytes]) -> None:
        """Close the guardian's stdin, which makes it clean up and exit."""
        if process.stdin is not None:
            process.stdin.close()

    def _start_guardian(self, binary: Path) -> subprocess.Popen[bytes]:
        for spec in self._specs:
            (self.folder / f"{spec.name}.conf").touch(0o600)
        commands = {spec.name: self._command(binary, spec) for spec in self._specs}
        (self.folder / guardian.SERVERS).write_text(json.dumps(commands), encoding="utf-8")
        # -I -S: without site packages and user settings it starts in 20 ms. It has its own session,
        # so that a Ctrl-C on the terminal reaches only the owner.
        arguments = [str(os.getpid()), str(self.folder), *_GUARDIAN_ROOTS]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARDIAN_MAIN, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def _command(self, binary: Path, spec: ServerSpec) -> list[str]:
        base = self.folder / spec.name
        settings = {
            "port": "0",
            "unixsocket": f"{base}.sock",
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "logfile": f"{base}.log",
            "daemonize": "no",
            "save": "",
            "appendonly": "no",
            "maxmemory": str(spec.maxmemory),
            "maxmemory-policy": spec.policy,
        }
        command = [str(binary), f"{base}.conf"]
        for name, value in settings.items():
            command += [f"--{name}", value]
        return [*command, *spec.options]

    def _await_server(self, spec: ServerSpec, until: float) -> None:
        connection = RespConnection(parse_endpoint(self.url(spec.name)))
        problem = "it did not answer"
        try:
            while time.monotonic() < until:
                if (self.folder / f"{spec.name}.failed").exists() or not self.is_alive:
                    problem = "it ended at once"
                    break
                try:
                    connection.open(until)
                    self._set_optional(connection, spec, until)
                    self.pid(spec.name)  # the server may answer before the guardian writes its pid
                    return
                except FileNotFoundError:
                    time.sleep(0.002)
                except StoreUnavailable as error:
                    problem = str(error)
                    time.sleep(0.002)
        finally:
            connection.close()
        raise ServerFailed(f"redis-server for {spec.name}: {problem}; {self._log_tail(spec)}")

    def _set_optional(self, connection: RespConnection, spec: ServerSpec, until: float) -> None:
        accepted: list[str] = []
        # Also write them to the server's config file, for restarts.
        for name, value in optional_settings(spec.maxmemory, spec.policy).items():
            # A server refuses a name that it does not know, so no list of versions is needed.
            with contextlib.suppress(ServerRefused):
                connection.command(until, b"CONFIG", b"SET", name.encode(), value.encode())
                accepted.append(f"{name} {value}\n")
        (self.folder / f"{spec.name}.conf").write_text("".join(accepted))

    def _log_tail(self, spec: ServerSpec) -> str:
        try:
            lines = (self.folder / f"{spec.name}.log").read_text(errors="replace").splitlines()
        except OSError:
            return "it wrote no log"
        return f"the last line of its log: {lines[-1].strip()}" if lines else "its log is empty"


class EmbeddedStore(EmbeddedServers):
    """An embedded store: one index server (noeviction) and `data_instances` data servers
    (volatile-ttl). The data servers share `store_memory` bytes."""

    def __init__(
        self,
        store_memory: int = DEFAULT_STORE_MEMORY,
        *,
        data_instances: int = 1,
        pool: str = "default",
        binary: Path | None = None,
        root: Path | None = None,
    ) -> None:
        self._pool = pool
        self._data = [f"data{number}" for number in range(data_instances)]
        share = store_memory // data_instances
        specs = [ServerSpec("index", INDEX_MEMORY, "noeviction")]
        specs += [ServerSpec(name, share, "volatile-ttl") for name in self._data]
        super().__init__(specs, binary=binary, root=root)

    def __enter__(self) -> EmbeddedStore:
        self.start()
        return self

    @property
    def index_url(self) -> str:
        return self.url("index")

    @property
    def data_urls(self) -> tuple[str, ...]:
        return tuple(self.url(name) for name in self._data)

    @property
    def settings(self) -> StoreSettings:
        """The settings for nodes and routers that use this store."""
        return StoreSettings(index_url=self.index_url, data_urls=self.data_urls, pool=self._pool)


def _private_folder(root: Path | None, longest_name: int) -> Path:
    """Create a 0700 directory in which socket paths are short enough: in `root` if given, else in
    the temporary directory, or in /tmp if that directory's path is too long."""
    places = [str(root)] if root is not None else [tempfile.gettempdir(), "/tmp"]
    for place in places:
        folder = Path(tempfile.mkdtemp(prefix="baton-", dir=place))
        if len(os.fsencode(folder)) + 1 + longest_name + len(".sock") <= LONGEST_SOCKET_PATH:
            return folder
        folder.rmdir()
    raise ServerFailed(
        f"the paths of sockets would be too long in {' and '.join(places)}; set TMPDIR to a"
        " directory with a shorter path"
    )
