"""Gives some of a test's processes a wrong time of day, with the distribution's libfaketime.

In: the seconds by which the clock is ahead, which may change while the processes run. Out: the
environment of a process with that time of day, or a script that starts a program in it. Only the
time of day is wrong: monotonic clocks stay true, as on a machine whose clock was set wrong.
"""

from __future__ import annotations

import os
import platform
import shlex
from pathlib import Path

from tests.support.needs import needs
from tests.support.project.cache import made_once
from tests.support.project.debian import unpack_faketime

HOUR_S = 3600
# With a true monotonic clock, libfaketime breaks time.sleep(), which sleeps until a moment of that
# clock. Python runs this replacement (sitecustomize) before any other code.
SLEEP = """\
import select
import time

time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


class WrongClock:
    """The time of day of all processes with this `environment`. `folder` must not be shared."""

    def __init__(self, folder: Path, ahead_s: int = 0) -> None:
        library = _library()
        self._folder = folder
        self._file = folder / "ahead"
        (folder / "sitecustomize.py").write_text(SLEEP)
        paths = (str(folder), os.environ.get("PYTHONPATH", ""))
        self.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",  # read the file at each call: a change takes effect at once
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",  # a killed process would leave its segment behind
        }
        self.set(ahead_s)

    def set(self, ahead_s: int) -> None:
        """Set the clock ahead by `ahead_s`; running processes see it jump."""
        written = self._file.with_suffix(".new")
        written.write_text(f"{ahead_s:+d}\n")
        written.replace(self._file)

    def before(self, program: Path) -> Path:
        """Write a script that starts the program with this time of day."""
        script = self._folder / program.name
        variables = " ".join(
            f"{name}={shlex.quote(text)}" for name, text in self.environment.items()
        )
        script.write_text(f'#!/bin/sh\n{variables} exec {shlex.quote(str(program))} "$@"\n')
        script.chmod(0o755)
        return script


def _library() -> Path:
    """Return libfaketime for multithreaded programs; skip the calling test without apt."""
    needs("apt")
    known = platform.freedesktop_os_release()
    release = f"{known['ID']}-{known.get('VERSION_ID', '')}"
    folder = made_once("libfaketime", release, lambda empty: unpack_faketime(empty, print))
    [library] = folder.glob("usr/lib/*/faketime/libfaketimeMT.so.1")
    return library
