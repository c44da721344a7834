"""Gives freed memory back to the system while a model loads or is calibrated.

glibc's allocator keeps freed blocks for later, and raises the size from which it asks the system directly. Repacking a
module frees blocks of many megabytes between small ones that stay, so the process would grow by holes of the size of
whole modules: by 25 to 50 MB while a model of 41 MB loads.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHARE = 0.1
"""Of the time that loading takes, the most that giving back may take."""


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (AttributeError, OSError, TypeError):
        return None


class Trimmer:
    """Called after every module: gives back what it freed, unless that has taken too much of the time so far."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spent = 0.0

    def __call__(self) -> None:
        trim, now = _malloc_trim(), time.perf_counter()
        if trim is not None and self._spent <= SHARE * (now - self._start):
            trim(0)
            self._spent += time.perf_counter() - now


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""malloc.h's numbers of mallopt's settings."""
MAPPED_FROM = 1 << 20
GLIBC_MOST = 32 << 20
"""Where glibc's own, growing threshold ends up once a block so large has been freed."""


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Blocks of a mebibyte and more come from the system and go back to it when they are freed. For long work whose
    largest tensors come and go: with glibc's growing threshold (up to 32 MiB) the holes that they leave in the heap
    add up to a fifth of the process, the more the longer it runs."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        yield
        return
    mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
    try:
        yield
    finally:
        mallopt(M_MMAP_THRESHOLD, GLIBC_MOST)
        mallopt(M_TRIM_THRESHOLD, 2 * GLIBC_MOST)
