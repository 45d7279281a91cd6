"""Processes that end with the one that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Asks the kernel for SIGKILL when the parent dies, before anything is imported. A parent that died before that is found
# by its number. Linux only; elsewhere a child of the supervisor sees the end of its socket.
_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(1)):
    os._exit(1)
"""


def start_child(
    code: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    keep: Sequence[int] = (),
    quiet: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts Python in a process group of its own, so that all that it starts can be ended with it.

    To be called in the main thread: the kernel takes the end of the calling thread for that of the parent.

    Args:
        code: what it runs.
        arguments: `sys.argv[1:]` of it.
        environment: added to that of this process.
        keep: file descriptors that it inherits.
        quiet: its standard output is collected, and its errors with it.
    """
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", _WITH_PARENT + code, str(os.getpid()), *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.STDOUT if quiet else None,
        pass_fds=keep,
        process_group=0,
    )


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Ends a child and all that it started, at once; what it started may outlive it. Does not wait."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def wait_s(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Returns whether a child has ended within some seconds."""
    try:
        child.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True
