"""Keeps a command going if it was started with a closed standard stream, as by `>&-`."""

from __future__ import annotations

import os
import sys
from typing import TextIO

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_closed_streams() -> None:
    """Replaces closed standard streams with the null device.

    Otherwise the next file that the process opens gets the number of the stream, and receives what native libraries
    print.
    """
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != number and not _is_open(number):  # an import may have opened a file under this number
            os.dup2(null, number, inheritable=True)
            os.close(null)
            null = number
        os.set_inheritable(null, True)
        setattr(sys, name, os.fdopen(null, mode))


def discard_output(stream: TextIO | None = None) -> None:
    """Sends the rest of a stream, by default standard output, nowhere: the interpreter writes it out once more when it
    exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, (sys.stdout if stream is None else stream).fileno())
    os.close(null)


def discard_unwritable_output() -> None:
    """Discards what standard output still holds, if it cannot be written, for example because a disk is full.

    Otherwise the interpreter fails to write it when it exits, and replaces the exit status by 120.
    """
    try:
        sys.stdout.flush()
    except OSError:
        discard_output()


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
