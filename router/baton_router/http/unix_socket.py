"""The unix socket on which a router listens: its file is made at the start and removed at the end.

In: a path. Out: a bound socket whose file its owner and group may use. A file that an ended router
left behind is replaced; one on which somebody listens, or that is no socket, is not touched.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress

MODE = 0o660
PROBE_S = 1.0  # a listener that does not accept for this long still listens


class UnixSocket:
    """A bound `listener` that does not listen yet. Raise OSError."""

    def __init__(self, path: str) -> None:
        # A later change of the working directory must not move the file.
        self._path = os.path.abspath(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_left_behind(self._path)
            self.listener.bind(self._path)
            os.chmod(self._path, MODE)  # nobody can connect before it listens
            self._inode = os.stat(self._path).st_ino
        except BaseException:
            self.listener.close()
            raise

    def remove(self) -> None:
        """Remove the file, unless another process has replaced it. Idempotent."""
        with suppress(OSError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)


def _remove_left_behind(path: str) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(errno.EEXIST, "the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except (TimeoutError, BlockingIOError):
            pass  # its queue of connections is full
    raise OSError(errno.EADDRINUSE, "another process listens on it")
