"""The lock of a run's directory, which lets only one run write to it at a time.

The lock is a file with a random token, which its owner updates every few seconds. Another run that finds the lock
watches it with its own clock: a lock that has not changed for a while no longer has an owner. The lock's host name and
process id are only for people, because they repeat in containers. The owner checks the token again before it publishes,
deletes or logs anything, so that an owner that was suspended and has lost the lock does no harm when it resumes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Self

from ..._foreign import brief, printable
from .._exit_codes import RETRY
from ._own_file import naming, open_own, stranger

BEAT_S = 5.0
# A lock that has not changed for this long is taken over. This is longer than a compiler may keep Python from running.
STALE_S = 60.0
# A run that waits for a lock that still changes gives up after this long; a job that ends first saves its state.
PATIENCE_S = 120.0
# The wait after taking over, in case another run takes over at the same moment.
_SETTLE_S = 1.0
_PAUSE_S = 0.5

_TOKEN_DIGITS = 32
_LINES = 4
# Matches a lock, or the beginning of one that is being written.
_FORM = re.compile(rf"[0-9a-f]{{{_TOKEN_DIGITS}}}\n|[0-9a-f]{{0,{_TOKEN_DIGITS}}}\Z")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class LostLock(OSError):
    """Raised when another run has taken over the directory, or the lock was deleted."""

    exit_code = RETRY


@dataclasses.dataclass(frozen=True)
class Ownership:
    """Proof that a run may write to its directory.

    Attributes:
        path: the path of the lock.
        token: the token of its owner.
    """

    path: Path
    token: str

    def check(self) -> None:
        """Checks that this run still owns the lock.

        Raises:
            LostLock: if another run owns it, or it is gone.
        """
        found = _read(self.path)
        if found[:_TOKEN_DIGITS] != self.token:
            other = f"It now belongs to {_described(found)}" if found else "It has been deleted"
            raise LostLock(
                f"this run has lost its lock {self.path}, because it made no progress for more than {STALE_S:.0f} s "
                f"or the file was removed. {other}. This run writes nothing more, so that the two do not mix"
            )


class Lock:
    """Keeps other runs from writing to a directory. A context manager, which releases the lock.

        lock = Lock(path)
        while not lock.attempt():
            ...
        with lock:
            lock.ownership.check()

    Args:
        path: the path of the lock file; its directory is created.
        stale_s: the seconds without a change after which a lock is taken over.
        patience_s: the seconds after which to give up if the owner is alive.
        beat_s: the seconds between two changes.
        note: called once with a message if another run has the lock.
        clock: returns a monotonic time in seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        stale_s: float = STALE_S,
        patience_s: float = PATIENCE_S,
        beat_s: float = BEAT_S,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ownership = Ownership(path, secrets.token_hex(_TOKEN_DIGITS // 2))
        self._path, self._stale_s, self._patience_s, self._beat_s = path, stale_s, patience_s, beat_s
        self._note, self._clock = note, clock
        self._seen: str | None = None
        self._begun = self._changed = 0.0
        self._file: IO[str] | None = None
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def acquire(self) -> Self:
        """Waits until this run has the lock.

        Raises:
            ValueError: for the same reasons as `attempt`.
        """
        while not self.attempt():
            time.sleep(_PAUSE_S)
        return self

    def attempt(self) -> bool:
        """Tries to get the lock, and returns whether this run has it now; if not, call this again.

        Raises:
            ValueError: if another run has the lock and continues, or the file is not the lock of a run.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._create():
            return self._own()
        found, now = _read(self._path), self._clock()
        if not found and not os.path.lexists(self._path):
            return False  # just deleted
        if not _FORM.match(found):
            raise self._foreign(found)
        if self._seen is None:
            self._begun = now
            self._note(
                f"{self._path.parent} is in use by {_described(found)}; waiting until that run ends, or until it has "
                f"been silent for {self._stale_s:.0f} s"
            )
        if found != self._seen:
            self._seen, self._changed = found, now
        if now - self._changed > self._stale_s or _owner_has_died_here(self._path, found):
            if found.count("\n") < _LINES:
                raise self._foreign(found)
            return self._take_over()
        if now - self._begun > self._patience_s:
            raise ValueError(
                f"another run, {_described(found)}, is still writing to {self._path.parent}. Wait for it to end, end "
                f"it, or choose another --out. (If nothing runs there, delete {self._path}.)"
            )
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            self.ownership.check()
            self._path.unlink()
        if self._file is not None:
            self._file.close()

    def _foreign(self, found: str) -> ValueError:
        return ValueError(
            f"{self._path} is not the lock of a run of gtp-jax: it holds {brief(found)}. Choose another --out, or move "
            "the file away."
        )

    def _create(self) -> bool:
        """Creates the file, and returns whether it did; it does not if the file exists."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            return False
        self._write(os.fdopen(descriptor, "r+"), self._path)
        return True

    def _take_over(self) -> bool:
        """Replaces the file of a dead owner with this run's file; if several runs do so, the last one gets the lock."""
        mine = self._path.with_name(f"{self._path.name}.{self.ownership.token}")
        self._write(mine.open("x+"), mine)
        mine.replace(self._path)
        time.sleep(_SETTLE_S)
        return self._own()

    def _own(self) -> bool:
        if _read(self._path)[:_TOKEN_DIGITS] != self.ownership.token:
            assert self._file is not None
            self._file.close()
            self._seen = None
            return False
        self._thread.start()
        return True

    def _write(self, file: IO[str], path: Path) -> None:
        """Writes the lines of the file: the token, the machine's boot id, the owner's name, and a count."""
        boot = ""
        with contextlib.suppress(OSError):  # not all file systems support this; then only silence shows a dead owner
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            boot = _boot()
        who = f"process {os.getpid()} on {socket.gethostname()}"
        try:
            with naming(path):
                file.write(f"{self.ownership.token}\n{boot}\n{who}\n{0:020d}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)  # otherwise the next run waits for its owner
            with contextlib.suppress(OSError):
                file.close()
            raise
        self._file = file

    def _beat(self) -> None:
        """Increments the count in the file that this run created; a file that replaces it is not touched."""
        assert self._file is not None
        descriptor = self._file.fileno()
        place = os.fstat(descriptor).st_size - 21
        count = 0
        while not self._released.wait(self._beat_s):
            count += 1
            with contextlib.suppress(OSError):  # the owner checks its token before it does anything
                os.pwrite(descriptor, f"{count:020d}\n".encode(), place)
                os.fsync(descriptor)


def is_lock(path: Path) -> bool:
    """Returns whether a file is a lock, or a lock that is being written."""
    return os.path.lexists(path) and stranger(path) is None and _FORM.match(_read(path)) is not None


def _read(path: Path) -> str:
    """Returns the text of a lock; empty if there is none."""
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _described(found: str) -> str:
    """Returns a description of a lock's owner that is safe to print on a terminal."""
    return printable("".join(found.splitlines()[2:3])[:100]) or "an unknown process"


def _boot() -> str:
    """Returns the id of this boot of this machine, which is unique; empty if there is none."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def _owner_has_died_here(path: Path, found: str) -> bool:
    """Returns whether the owner is known to be dead, so that there is no need to wait.

    It is if it ran on this boot of this machine and the system has released its lock on the file.
    """
    boot = _boot()
    if not boot or found.splitlines()[1:2] != [boot] or found.count("\n") < _LINES:
        return False
    with contextlib.suppress(OSError), path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _read(path)[:_TOKEN_DIGITS] == found[:_TOKEN_DIGITS]
    return False
