"""Reports the end of a process that can no longer do so itself.

When process 0 of a run dies, JAX ends the others immediately from native code, and no more Python runs. And while
native code holds Python's GIL, no Python thread can report that the process is stuck. Therefore each process has a
small child, which reads a pipe. If the pipe closes without a farewell, the child prints where the last checkpoint is.
If no beat arrives for a long time, it ends the process with SIGABRT, on which `faulthandler` prints the stacks of all
threads.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

from ._directory import RunDirectory

# A process without a beat for this long no longer runs Python.
FROZEN_S = 600.0

# Only the pipe may end the child. It imports this package only if it has something to print. It counts the seconds in
# which neither it nor the process is suspended.
_WAIT = """
import os, select, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
root, process, parent, frozen_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
replaced = int(sys.argv[5])

def stopped():
    try:
        with open(f"/proc/{parent}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False

reason, last, silent = "it was ended from outside, or by jax because another process died", b"", 0.0
while True:
    began = time.monotonic()
    if select.select([0], [], [], 1.0)[0]:
        read, silent = os.read(0, 4096), 0.0
        if not read:
            break
        last = (last + read)[-8:]
    elif time.monotonic() - began < 3.0 and not stopped():
        silent += 1.0
    if silent > frozen_s:
        reason = f"it has run no Python for {frozen_s:.0f} s; the stacks above say where it is"
        os.kill(parent, signal.SIGABRT)
        time.sleep(1.0)
        break
if last != b"farewell":
    from pathlib import Path
    from gtp_jax.runner.trainer._directory import RunDirectory
    from gtp_jax.runner.trainer._guard import last_words
    print(last_words(RunDirectory(Path(root), replaced), process, reason), file=sys.stderr, flush=True)
"""


class Guard:
    """The child of this process.

    Args:
        directory: the directory of the run.
        process: the number of this process.
        frozen_s: the seconds without a beat after which this process is ended.
    """

    def __init__(self, directory: RunDirectory, process: int, *, frozen_s: float = FROZEN_S) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        arguments = [str(directory.root), str(process), str(os.getpid()), str(frozen_s), str(directory.replaced)]
        self._child = subprocess.Popen(
            [sys.executable, "-c", _WAIT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment
        )
        self._writing = threading.Lock()

    def beat(self) -> None:
        """Tells the child that this process still runs Python."""
        self._write(b".")

    def dismiss(self) -> None:
        """Ends the child silently."""
        self._write(b"farewell", last=True)
        self._child.wait()

    def _write(self, words: bytes, *, last: bool = False) -> None:
        pipe = self._child.stdin
        assert pipe is not None
        with self._writing, contextlib.suppress(OSError):  # a killed child is no reason for this process to end
            if not pipe.closed:
                pipe.write(words)
                pipe.close() if last else pipe.flush()


def say_last(words: str) -> None:
    """Prints a last message; ignores errors, because the reader may be gone or the disk full."""
    for stream, text in ((sys.stdout, ""), (sys.stderr, f"{words}\n")):
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def last_words(directory: RunDirectory, process: int, reason: str) -> str:
    """Returns the last message of a process that cannot continue."""
    return f"\ngtp-jax: process {process} cannot go on: {reason}.\n{directory.how_to_resume()}"
