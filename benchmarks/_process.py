"""Runs a contender's process: reads its output as it comes, and ends it with all its children after a timeout."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

_REASON_LENGTH = 110
# The seconds that torchrun has to end its workers, which run in their own sessions.
_GRACE_S = 10
_POLL_S = 0.5


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    hear: Callable[[str], object] = lambda line: None,
    stop: threading.Event | None = None,
) -> tuple[int | None, str]:
    """Runs a program.

    Args:
        command: the command line.
        environment: the complete environment.
        timeout_s: the seconds after which the program is ended.
        hear: called with each line of output as it arrives, in another thread.
        stop: an event that another thread can set to end the program early.

    Returns:
        The exit status, or `None` if the program was ended, and the output.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment),
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=_read, args=(process.stdout, lines, hear), daemon=True)
    reader.start()
    deadline, code = time.monotonic() + timeout_s, None
    try:
        while code is None and time.monotonic() < deadline and not (stop and stop.is_set()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(max(0.0, min(_POLL_S, deadline - time.monotonic())))
    finally:
        if code is None:
            _end(process)
    reader.join(_GRACE_S)  # a grandchild may still hold the pipe open
    return code, "".join(lines)


def reason(code: int, output: str) -> str:
    """Returns the line of a failed program's output that most likely explains the failure; its exit status if there is
    none. Long lines are cut."""
    errors = re.findall(r"^(?:\[rank0\]: *)?([\w.]*(?:Error|Exception): .+|error: .+)$", output, re.MULTILINE)
    errors += re.findall(r"ModuleNotFoundError: [^)\n]+|No module named [^)\n]+", output)
    memory = [e for e in errors if "memory" in e.lower()]
    line = (memory or errors or [f"exit status {code}"])[0].strip()
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"


def _read(output: IO[str], lines: list[str], hear: Callable[[str], object]) -> None:
    with output:
        for line in output:
            lines.append(line)
            hear(line)


def _end(process: subprocess.Popen[str]) -> None:
    for how, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
