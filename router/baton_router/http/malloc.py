"""Tells glibc's malloc to give freed memory back: a router frees large bodies all the time.

No effect with other C libraries.
"""

from __future__ import annotations

import ctypes

# Parameters of mallopt in malloc.h.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
_OWN_PAGES = 256 << 10  # bytes; larger allocations return to the system when freed
_ARENAS = 2


def keep_little_memory() -> None:
    """Tell glibc to keep little freed memory. By default it raises the size from which memory
    returns to the system up to 32 MiB, and uses eight arenas per core, each with its own free
    memory. No effect with other C libraries."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _OWN_PAGES)
        mallopt(_ARENA_MAX, _ARENAS)


def return_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
