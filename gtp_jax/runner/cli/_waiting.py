"""Says on standard error what a long call does, how long that usually takes, and how much time has passed."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

# The seconds between two lines.
_EVERY_S = 30.0


@contextlib.contextmanager
def waiting(what: str, usually: str, every_s: float = _EVERY_S) -> Iterator[None]:
    """Prints a line at once, and another one every few seconds until the block ends.

    Args:
        what: what is done meanwhile.
        usually: how long that takes.
        every_s: the seconds between two lines.
    """
    began, ended = time.monotonic(), threading.Event()

    def say(text: str) -> None:
        print(f"gtp-jax {text}", file=sys.stderr, flush=True)

    def tell() -> None:
        while not ended.wait(every_s):
            say(f"{what}: {time.monotonic() - began:.0f} s so far")

    say(f"{what}, which takes {usually}")
    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
