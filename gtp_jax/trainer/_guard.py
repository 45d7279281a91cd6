"""A last word for a process that cannot speak any more.

When process 0 of a run dies, jax ends the others at once from native code: no Python runs after that. So each process
of several keeps a small child, which waits on a pipe. If the pipe closes without a word of farewell, the child says
where the last checkpoint is.
"""

from __future__ import annotations

import os
import subprocess
import sys

from ._directory import RunDirectory

# Only the pipe may end the child; it imports this package only if it has something to say.
_WAIT = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.stdin.buffer.read() != b"farewell":
    from pathlib import Path
    from gtp_jax.trainer._directory import RunDirectory
    from gtp_jax.trainer._guard import last_words
    reason = "it was ended from outside, or by jax because another process died"
    print(last_words(RunDirectory(Path(sys.argv[1])), int(sys.argv[2]), reason), file=sys.stderr, flush=True)
"""


class Guard:
    """The child of one process.

    Args:
        directory: of the run.
        process: number of this process.
    """

    def __init__(self, directory: RunDirectory, process: int) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._child = subprocess.Popen(
            [sys.executable, "-c", _WAIT, str(directory.root), str(process)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
        )

    def dismiss(self) -> None:
        """Ends the child without a word."""
        assert self._child.stdin is not None
        self._child.stdin.write(b"farewell")
        self._child.stdin.close()
        self._child.wait()


def last_words(directory: RunDirectory, process: int, reason: str) -> str:
    """Returns what a process says that cannot go on."""
    return f"\ngtp-jax: process {process} cannot go on: {reason}.\n{directory.how_to_resume()}"
