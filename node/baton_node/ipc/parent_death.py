"""End with the process that started us, however it ended.

PR_SET_PDEATHSIG (Linux) makes the kernel send a signal when the parent dies, kill -9 included;
it is the child that asks for it, so a parent that died before the question must be noticed too.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask for SIGKILL at the parent's death; raise SystemExit if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        raise SystemExit("baton: the process that started this one is gone")
