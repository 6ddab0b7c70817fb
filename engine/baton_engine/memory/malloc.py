"""Make malloc keep a step's memory for the next step, and give memory back to the kernel.

A step on a CPU allocates and frees the same tensors again and again. glibc returns large ones to
the kernel, and the kernel zeroes each page at its next first use. On a virtual machine, a norm of
512 tokens took ten times as long, and a whole prefill step a tenth longer.
"""

from __future__ import annotations

import ctypes
import mmap

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc's maximum, in bytes
KEPT = 1 << 30  # bytes
MADV_DONTNEED = 4  # madvise(2)
PAGE_BYTES = mmap.PAGESIZE


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep up to 1 GiB of free memory at the end of the heap, for tensors of up
    to 32 MiB. Returns False, without any effect, if there is no mallopt (not glibc), and also if
    mallopt refuses a value."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD), mallopt(M_TRIM_THRESHOLD, KEPT)
    return kept == (1, 1)


def return_freed_memory() -> bool:
    """Return the heap's free pages to the kernel, also those that keep_freed_memory() keeps. False
    if there is no malloc_trim (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def empty_pages(address: int, size: int) -> bool:
    """Return the whole pages in `size` bytes to the kernel. They stay mapped, and read as zeros
    from now on; bytes beside them are zeroed here. False if the kernel refuses, or if there is no
    madvise (not Linux): then all bytes are zeroed."""
    begin, end = -(-address // PAGE_BYTES) * PAGE_BYTES, (address + size) // PAGE_BYTES * PAGE_BYTES
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if begin >= end or madvise is None:
        ctypes.memset(address, 0, size)
        return False
    ctypes.memset(address, 0, begin - address)
    ctypes.memset(end, 0, address + size - end)
    length = ctypes.c_size_t(end - begin)
    if madvise(ctypes.c_void_p(begin), length, MADV_DONTNEED):
        ctypes.memset(begin, 0, end - begin)
        return False
    return True
