"""Make malloc keep a step's memory for the next step.

A step on a CPU allocates and frees the same tensors again and again. glibc returns large ones to
the kernel, and the kernel zeroes each page at its next first use. On a virtual machine, a norm of
512 tokens took ten times as long, and a whole prefill step a tenth longer.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's maximum, in bytes
KEPT = 1 << 30  # bytes


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep up to 1 GiB of free memory at the end of the heap, for tensors of up
    to 32 MiB. Returns False, without any effect, if there is no mallopt (not glibc), and also if
    mallopt refuses a value."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD), mallopt(M_TRIM_THRESHOLD, KEPT)
    return kept == (1, 1)
