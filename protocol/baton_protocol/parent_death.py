"""Make a process die with its parent, however the parent dies.

With PR_SET_PDEATHSIG (Linux) the kernel sends the child a signal when its parent dies, even by
kill -9. The child itself sets it, so it must also check whether the parent died before that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Get SIGKILL when the thread that forked this process ends. Raise SystemExit if the parent is
    dead already, and OSError if prctl fails. Other systems than Linux send no signal."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit("baton: the process that started this one is gone")
