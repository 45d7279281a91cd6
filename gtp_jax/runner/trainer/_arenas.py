"""Memory of the host that a long run does not need."""

from __future__ import annotations

import ctypes
import os
import platform

_M_ARENA_MAX = -8  # of glibc's malloc.h
_FEW = 2


def limit_arenas() -> None:
    """Lets glibc's `malloc` have two heaps for all threads, unless the environment says how many.

    It makes up to eight a core, and each keeps what its threads have freed: on 32 cores a run's memory went on growing
    for thousands of steps. Elsewhere than with glibc this does nothing.
    """
    said = "MALLOC_ARENA_MAX" in os.environ or "arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    if not said and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _FEW)
