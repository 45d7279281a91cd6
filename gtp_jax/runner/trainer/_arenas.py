"""Limits the host memory that glibc's `malloc` keeps."""

from __future__ import annotations

import ctypes
import os
import platform

_M_ARENA_MAX = -8  # from glibc's malloc.h
_FEW = 2


def limit_arenas() -> None:
    """Limits glibc's `malloc` to two heaps (arenas) for all threads, unless the environment sets their number.

    By default, glibc creates up to eight heaps per core, and each keeps the memory that its threads have freed: on 32
    cores, the memory of a run kept growing for thousands of steps. Does nothing without glibc.
    """
    said = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not said and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _FEW)
