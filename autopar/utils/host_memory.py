"""Pages of memory that a step on CPUs frees, kept for the next step."""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 1 << 30  # free at the end of the heap before any of it goes back to the system
BLOCK_BYTES = 32 << 20  # of the heap; larger ones are mapped one by one. The most that glibc takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
OWN_CHOICES = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"


def keep_freed_pages() -> bool:
    """Let glibc keep up to KEPT_BYTES that the process frees, and return whether it does: not where the environment has
    one of OWN_CHOICES, nor with another C library.

    Gathered parameters and gradients come and go in each step. By default the system takes their pages back and clears
    them again, four thousand in a step of 20 MiB of parameters, which is a twentieth of its time. CUDA's caching
    allocator keeps memory for the same reason."""
    if not sys.platform.startswith("linux") or any(name in os.environ for name in OWN_CHOICES):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(_TRIM_THRESHOLD, KEPT_BYTES) and libc.mallopt(_MMAP_THRESHOLD, BLOCK_BYTES))
