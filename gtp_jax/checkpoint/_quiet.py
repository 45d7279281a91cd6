"""Suppresses what orbax and tensorstore print about errors that are also raised, once and with a remedy."""

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

# Parts of messages that orbax logs through absl's logger.
_SAID_TWICE = (
    # logged at every restore, about a file that checkpoints may lack
    "Metadata file does not exist",
    # logged by each thread of a failed write, with a traceback; `Checkpoints.wait` raises the error
    "_SignalingThread.run()",
    "in background save thread",
    " Finalize thread",
)
# How asyncio's logger begins when a task has failed and nobody waits for it, because another part failed first.
_UNHEARD = "Task exception was never retrieved"
# The error that asyncio raises in each tensorstore thread whose work was abandoned because another part failed.
_CLOSED = "Event loop is closed"
# The number of seconds without such an error after which no more are expected, and the longest time in seconds that the
# end of the process waits for them.
_STILL, _MOST = 0.3, 5.0

_last = -math.inf


@functools.cache
def keep_quiet() -> None:
    """Suppresses these messages for the rest of the process. Other messages and all errors are unaffected."""
    logging.getLogger("absl").addFilter(_is_news)
    logging.getLogger("asyncio").addFilter(_is_of_others)
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if _is_abandoned(unraisable):
            work_abandoned()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    atexit.register(_wait_for_threads)


def work_abandoned() -> None:
    """Records that tensorstore may still be doing work that nobody waits for."""
    global _last
    _last = time.monotonic()


def _wait_for_threads() -> None:
    """Waits for abandoned work, because the hook is no longer called once the interpreter shuts down."""
    end = time.monotonic() + _MOST
    while time.monotonic() < min(_last + _STILL, end):
        time.sleep(0.02)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in str(record.msg) for text in _SAID_TWICE)


def _is_of_others(record: logging.LogRecord) -> bool:
    """Returns whether asyncio's message is of anything but orbax's work that nobody waits for."""
    text = str(record.msg)
    return not (text.startswith(_UNHEARD) and f"{os.sep}orbax{os.sep}" in text)


def _is_abandoned(unraisable: Any) -> bool:
    """Returns whether an error comes from work that nobody waits for: a result that a tensorstore thread passes to a
    closed event loop, or one of orbax's reads."""
    trace, work = unraisable.exc_traceback, unraisable.object
    if inspect.iscoroutine(work):
        return f"{os.sep}orbax{os.sep}" in work.cr_code.co_filename
    to_loop = trace is not None and trace.tb_frame.f_code.co_name == "call_soon_threadsafe"
    return to_loop and str(unraisable.exc_value) == _CLOSED
