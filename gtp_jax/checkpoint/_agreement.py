"""Reads in all processes, so that all of them fail if one does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..mesh import of_all_processes
from ._checksums import DamagedCheckpoint

# The seconds to wait before each further attempt after a read failed without proof of damage: a network file system may
# recover in a moment.
PAUSES = (1.0, 4.0)

# How many bytes of an error message are sent to the other processes.
_TOLD = 1024

# The outcomes of a read in one process; the greatest of all processes counts.
_FINE, _UNREADABLE, _DAMAGED, _OTHER = range(4)


def read_together[T](read: Callable[[], T], path: Any) -> T:
    """Reads in every process. Every process must call this.

    Damage that is proven by a checksum or by a missing file raises at once. Other errors of the system or of a decoder
    may be transient, so the read is retried.

    Args:
        read: reads a step, or a part of it; may be called several times.
        path: the path of the step's directory, for messages.

    Raises:
        DamagedCheckpoint: if any process finds that files have changed since they were written.
        OSError: if a process could not read files and none found damage.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = _with_patience(read)
    except Exception as caught:
        error = caught
    kind, process, text = _worst(error)
    if kind == _FINE:
        return result
    if kind == _OTHER or (kind == _DAMAGED and isinstance(error, DamagedCheckpoint)):
        raise error if error is not None else OSError(f"process {process} could not read {path}: {text}")
    where = f" in process {process}" if jax.process_count() > 1 else ""
    if kind == _DAMAGED:
        raise DamagedCheckpoint(path, [f"{line}{where}" for line in text.splitlines()])
    raise OSError(
        f"the checkpoint {path} could not be read{where} in {1 + len(PAUSES)} attempts, though nothing proves that it "
        f"is damaged: {text}. Check its file system and start again, or choose another step with --step."
    ) from error


def _with_patience[T](read: Callable[[], T]) -> T:
    for pause in PAUSES:
        try:
            return read()
        except DamagedCheckpoint:
            raise
        except (OSError, ValueError):  # tensorstore raises ValueError when the system refuses to read
            time.sleep(pause)
    return read()


def _worst(error: Exception | None) -> tuple[int, int, str]:
    """Returns the worst outcome of all processes, the first process with that outcome, and its error message."""
    kind, text = _FINE, ""
    if isinstance(error, DamagedCheckpoint):
        kind, text = _DAMAGED, "\n".join(error.lines)
    elif error is not None:
        kind, text = (_UNREADABLE if isinstance(error, (OSError, ValueError)) else _OTHER), str(error)
    if jax.process_count() == 1:
        return kind, 0, text
    mine = np.zeros(1 + _TOLD, np.uint8)
    told = np.frombuffer(text.encode()[:_TOLD], np.uint8)
    mine[0], mine[1 : 1 + len(told)] = kind, told
    every = of_all_processes(mine)
    process = int(every[:, 0].argmax())
    return int(every[process, 0]), process, bytes(every[process, 1:]).rstrip(b"\0").decode(errors="replace")
