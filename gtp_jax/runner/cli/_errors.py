"""Turns errors that a user can fix into one message without a traceback."""

from __future__ import annotations

import os

from ..._foreign import message
from .._exit_codes import EXHAUSTED, of_device, out_of_memory

_LESS = (
    "Use a smaller --preset, --seq or --batch, more --microbatches or more devices; `gtp-jax inspect` shows how much "
    "memory a step needs."
)


def explanation(error: BaseException) -> str | None:
    """Returns what to print for an error; `None` if it is a defect, whose traceback should be shown."""
    if isinstance(error, MemoryError):
        return f"out of memory{f': {message(error)}' if str(error) else ''}. {_LESS}"
    if of_device(error):
        first = message(error).partition("\n")[0]
        return f"out of memory: {first.removeprefix(f'{EXHAUSTED}: ')} {_LESS}" if out_of_memory(error) else None
    if not isinstance(error, (ValueError, OSError, ImportError)):
        return None
    if isinstance(error, OSError) and error.strerror:  # its text begins with a number
        if error.filename is not None:
            return message(OSError(f"{error.filename}: {error.strerror}"))
        unnamed = error.errno is not None and error.strerror == os.strerror(error.errno)
        return message(OSError(f"standard output, or another stream: {error.strerror}" if unnamed else error.strerror))
    return message(error)
