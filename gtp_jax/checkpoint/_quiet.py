"""Keeps quiet what orbax and tensorstore print of errors that are raised as well, once and with what to do."""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import math
import os
import sys
import time
from typing import Any

# orbax logs these under absl's name.
_SAID_TWICE = (
    # of a file that checkpoints may lack, at every restore
    "Metadata file does not exist",
    # of a write that has failed, for each of its threads, with a traceback; `Checkpoints.wait` raises it
    "_SignalingThread.run()",
    "in background save thread",
    " Finalize thread",
)
# What asyncio says to each of tensorstore's threads whose work was abandoned when another part of it had failed.
_CLOSED = "Event loop is closed"
# Seconds without such a word after which no more is expected, and the most that the end of the process waits.
_STILL, _MOST = 0.3, 5.0

_last = -math.inf


@functools.cache
def keep_quiet() -> None:
    """Leaves these messages out, for the rest of the process. All others, and all errors, are as they were."""
    logging.getLogger("absl").addFilter(_is_news)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if _is_abandoned(unraisable):
            work_abandoned()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    atexit.register(_wait_for_threads)


def work_abandoned() -> None:
    """Says that tensorstore may still be at work of which nobody waits for the end."""
    global _last
    _last = time.monotonic()


def _wait_for_threads() -> None:
    """Waits for abandoned work: once the interpreter ends, no hook is asked."""
    end = time.monotonic() + _MOST
    while time.monotonic() < min(_last + _STILL, end):
        time.sleep(0.02)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in _SAID_TWICE)


def _is_abandoned(unraisable: Any) -> bool:
    """Says whether an error is of work that nobody waits for: a result that one of tensorstore's threads hands to an
    event loop that is closed, or one of orbax's reads."""
    trace, work = unraisable.exc_traceback, unraisable.object
    if inspect.iscoroutine(work):
        return f"{os.sep}orbax{os.sep}" in work.cr_code.co_filename
    to_loop = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
    return to_loop and str(unraisable.exc_value) == _CLOSED
