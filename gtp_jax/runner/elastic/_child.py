"""Starts processes that end when their parent does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

# Asks the kernel for SIGKILL when the parent dies, before any other import. If the parent died even earlier, the parent
# PID no longer matches. Linux only; elsewhere, a child of the supervisor notices that its socket has closed.
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
    """Starts Python in its own process group, so that everything it starts can be ended with it.

    Must be called in the main thread, because the kernel treats the end of the calling thread as the parent's death.

    Args:
        code: the Python code to run.
        arguments: the child's `sys.argv[1:]`.
        environment: variables added to the environment of this process.
        keep: the file descriptors that the child inherits.
        quiet: whether to capture the child's standard output and standard error in one pipe.
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
    """Kills a child and everything that it started, which may have outlived it. Does not wait."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def wait_s(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Waits for a child for at most `seconds` and returns whether it has ended."""
    try:
        child.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return False
    return True
