"""Makes a run the owner of its directory while it writes there."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import jax

from ._directory import RunDirectory
from ._lock import Lock, Ownership
from ._peers import Peers
from ._watch import Supervision

_PAUSE_S = 0.5


@contextlib.contextmanager
def owning(directory: RunDirectory, supervision: Supervision | None, peers: Peers) -> Iterator[Callable[[], None]]:
    """Holds the lock of a directory in the first process; waits while another run holds it. Every process must enter.

    A supervisor holds the lock across all restarts of its processes, which therefore only check it.

    Yields:
        A function that the first process calls before it publishes, deletes or logs something. It raises `LostLock` if
        the process must not.

    Raises:
        ValueError: if another run holds the lock and continues.
    """
    if supervision is not None and supervision.token is not None:
        yield Ownership(directory.lock, supervision.token).check
        return
    lock = Lock(directory.lock, note=lambda text: print(f"gtp-jax train: {text}", file=sys.stderr, flush=True))
    first = jax.process_index() == 0
    while not peers.ask(peers.together(lambda: not first or lock.attempt()), all):
        time.sleep(_PAUSE_S)
    if first:
        with lock:
            yield lock.ownership.check
    else:
        yield lambda: None
