"""Gives freed memory back to the system while a model loads.

glibc's allocator keeps freed blocks for later, and raises the size from which it asks the system directly. Repacking a
module frees blocks of many megabytes between small ones that stay, so the process would grow by holes of the size of
whole modules: by 25 to 50 MB while a model of 41 MB loads.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

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
