"""Have malloc keep the memory of a step for the next one.

A step on a CPU allocates and frees the same tensors again and again. glibc gives large ones back to
the kernel, and the kernel fills each page with zeros when it is touched anew: a norm of 512 tokens
took ten times as long on a virtual machine, a whole prefill step a tenth longer.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no larger one
KEPT = 1 << 30


def keep_freed_memory() -> bool:
    """Up to 1 GiB that stands free at the end of the heap, and of tensors up to 32 MiB. False,
    and nothing changed, where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD), mallopt(M_TRIM_THRESHOLD, KEPT)
    return kept == (1, 1)
