"""A run owns its directory while it writes there."""

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
    """Holds the lock of a directory, in the first process; waits while another run does. Every process must enter.

    A supervisor holds the lock over all its fleets, so that its processes only check it.

    Yields:
        What the first process calls before it publishes, deletes or logs something; raises `LostLock` if it must not.

    Raises:
        ValueError: if another run has the lock and goes on.
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
