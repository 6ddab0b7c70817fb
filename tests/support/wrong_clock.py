"""A wrong time of day for some of a test's processes: libfaketime, from the distribution's package.

In: by how many seconds it is ahead, which may change while they run. Out: the environment of a
process with that time of day, or a script that starts a program so. Only the time of day is off:
monotonic clocks are what they are, as on a machine that was set wrong.
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
# libfaketime fails time.sleep(), which sleeps until a moment of the monotonic clock, where that
# clock is to stay true. Python runs this before anything else.
SLEEP = """\
import select
import time

time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


class WrongClock:
    """Of all processes with this `environment`; `folder` is its own."""

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
            "FAKETIME_NO_CACHE": "1",  # read at each look: a step is seen at once
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DISABLE_SHM": "1",  # a process that is killed would leave its segment behind
        }
        self.set(ahead_s)

    def set(self, ahead_s: int) -> None:
        """From now on; a step for who runs already."""
        written = self._file.with_suffix(".new")
        written.write_text(f"{ahead_s:+d}\n")
        written.replace(self._file)

    def before(self, program: Path) -> Path:
        """A script that starts the program with this time of day."""
        script = self._folder / program.name
        words = " ".join(f"{name}={shlex.quote(text)}" for name, text in self.environment.items())
        script.write_text(f'#!/bin/sh\n{words} exec {shlex.quote(str(program))} "$@"\n')
        script.chmod(0o755)
        return script


def _library() -> Path:
    """Skip the calling test where it cannot be had. The one for programs with threads."""
    needs("apt")
    known = platform.freedesktop_os_release()
    release = f"{known['ID']}-{known.get('VERSION_ID', '')}"
    folder = made_once("libfaketime", release, lambda empty: unpack_faketime(empty, print))
    [library] = folder.glob("usr/lib/*/faketime/libfaketimeMT.so.1")
    return library
