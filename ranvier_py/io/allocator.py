"""Have the C library keep freed memory instead of handing each large buffer back to the kernel.

By default glibc gives back what it frees at the top of its heap, so every body of 60 kB is received into pages that the
kernel must first find and clear: measured, joining two parts of 300 kB takes 200 us that way and 25 us on kept memory.
Cost: up to `KEEP_BYTES` of a process stay reserved after a peak. Where the C library has no `mallopt`, nothing changes.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_BYTES = 256 * 1024 * 1024  # four bodies of the largest size at once
MAP_BYTES_MIN = (
    32 * 1024 * 1024
)  # glibc's own upper limit (DEFAULT_MMAP_THRESHOLD_MAX); beyond it one mapping per buffer


def keep_freed_memory() -> bool:
    """Set it for this process. False where that can't be done."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAP_BYTES_MIN)) and bool(mallopt(M_TRIM_THRESHOLD, KEEP_BYTES))
