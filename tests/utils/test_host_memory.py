"""Freed pages stay with the process, unless the user's environment says otherwise."""

import os
import subprocess
import sys

from autopar.utils.host_memory import OWN_CHOICES

FAULTS = """
import ctypes, resource
from autopar.utils.host_memory import keep_freed_pages

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(4 << 20) for _ in range(8)]
    for block in blocks:
        libc.memset(block, 1, 4 << 20)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keeps = keep_freed_pages()
print(int(keeps), faults(), faults())
"""


def _run(**environment: str) -> list[int]:
    own = {k: v for k, v in os.environ.items() if k not in OWN_CHOICES} | environment
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=own, capture_output=True, text=True, timeout=60, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_pages_of_one_step_serve_the_next():
    keeps, first, second = _run()
    assert keeps
    assert first > 1000  # 32 MiB in pages of 4 KiB are 8,192; fewer where the system takes larger ones
    assert second < first / 50


def test_a_choice_of_the_user_counts():
    keeps, first, second = _run(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert not keeps
    assert second > first / 2
