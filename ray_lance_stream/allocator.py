"""Keeps the memory that a reader frees for its next read."""

from __future__ import annotations

import ctypes
import sys

# Numbers of glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 64 * 2**20  # per arena
_MMAP_BYTES = 32 * 2**20  # the most that glibc takes
_ARENAS = 4


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed in this process, up to `_KEPT_BYTES` in each of `_ARENAS` arenas.

    Lance allocates the buffers of each read with malloc. By default, glibc maps large ones anew each time and gives them back
    at once, so that the kernel zeroes every page of every read: a third of the CPU time of a read of scattered rows.

    Returns:
        Whether it does; only glibc can be asked.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    asked = {_M_MMAP_THRESHOLD: _MMAP_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES, _M_ARENA_MAX: _ARENAS}
    return all(mallopt(name, value) == 1 for name, value in asked.items())
