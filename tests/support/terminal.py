"""A terminal as a person has it: a pseudo terminal of the kernel, with pyte as its screen.

In: a command, its variables, what a person types. Out: the screen as it looks now. The command is
the session's leader and has the terminal for itself, so Ctrl-C reaches it as a signal. Every wait
is bounded, and a failure shows the screen. The command is killed at the end.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import pyte

WAIT_S = 120.0
LOOK_S = 0.02
PIECE = 1 << 16


class Terminal:
    """`with Terminal(["baton", "chat"]) as terminal:`; `screen` has the cells, `raw` is all
    that the command wrote."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str] | None = None,
        columns: int = 100,
        rows: int = 30,
    ) -> None:
        self.raw = b""
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        self._set_size(columns, rows)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "NO_COLOR"))}
        self._process = subprocess.Popen(
            # Not a fork of Python's own: this process has threads.
            ["setsid", "--ctty", *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", **(variables or {})},
        )
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            error.add_note(f"the screen:\n{self.text}")
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """The screen's lines, without the empty end of each."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def after(self, words: str) -> str:
        """The screen behind the last of these words, "" if it has none."""
        return self.text.rpartition(words)[2].strip() if words in self.text else ""

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        """As a person who drags the window's corner."""
        self.screen.resize(rows, columns)
        self._set_size(columns, rows)

    def wait_for(self, words: str, times: int = 1) -> str:
        """Wait until the screen has these words as often; return the screen."""
        self.wait_until(lambda: self.text.count(words) >= times, f"show {words!r}")
        return self.text

    def wait_until_gone(self, words: str) -> None:
        self.wait_until(lambda: words not in self.text, f"stop showing {words!r}")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < until, f"the command did not {what} within {WAIT_S:g} s"
            assert self._read(), f"the command ended before it did {what}"

    def wait_for_end(self) -> int:
        """The exit code."""
        until = time.monotonic() + WAIT_S
        while self._read():
            assert time.monotonic() < until, f"the command did not end within {WAIT_S:g} s"
        return self._process.wait(WAIT_S)

    def _read(self) -> bool:
        """Read new output, after a short wait for it. False after the command's end."""
        if select.select([self._ours], [], [], LOOK_S)[0]:
            try:
                piece = os.read(self._ours, PIECE)
            except OSError:  # the last process closed the terminal
                return False
            self.raw += piece
            self._stream.feed(piece)
        return True

    def _set_size(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)
