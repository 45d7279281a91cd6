"""The lock of a run's directory: one run writes to it at a time.

The lock is a file with a random token, which its owner touches every few seconds. Who finds it watches it on a clock of
its own: a lock that has not changed for a while belongs to nobody any more. Names of hosts and numbers of processes are
there to be read by people, as they repeat in containers. The owner reads the token again before whatever it publishes,
deletes or logs, so that one that was suspended, and has lost the lock meanwhile, does no harm when it wakes.
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

BEAT_S = 5.0
# A lock that has not changed for so long is taken over. Longer than a compiler may keep Python from running.
STALE_S = 60.0
# Whoever waits for a lock that does change gives up after so long; a job that ends saves its state first.
PATIENCE_S = 120.0
# After taking over, in case another takes over at the same moment.
_SETTLE_S = 1.0
_PAUSE_S = 0.5

_TOKEN_DIGITS = 32
_LINES = 4
# A lock, or the beginning of one that is just being written.
_FORM = re.compile(rf"[0-9a-f]{{{_TOKEN_DIGITS}}}\n|[0-9a-f]{{0,{_TOKEN_DIGITS}}}\Z")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class LostLock(OSError):
    """Another run has taken over the directory."""

    exit_code = RETRY


@dataclasses.dataclass(frozen=True)
class Ownership:
    """Proof that a run may write to its directory.

    Attributes:
        path: of the lock.
        token: of its owner.
    """

    path: Path
    token: str

    def check(self) -> None:
        """Checks that the lock is still that of this run.

        Raises:
            LostLock: if it is another's, or gone.
        """
        found = _read(self.path)
        if found[:_TOKEN_DIGITS] != self.token:
            other = f"It is now that of {_described(found)}" if found else "It has been deleted"
            raise LostLock(
                f"this run has lost its lock {self.path}, because it stood still for more than {STALE_S:.0f} s or "
                f"somebody removed the file. {other}. It writes nothing more, so that the two do not mix"
            )


class Lock:
    """Keeps other runs from a directory. A context manager, which releases it.

        lock = Lock(path)
        while not lock.attempt():
            ...
        with lock:
            lock.ownership.check()

    Args:
        path: of the file; its directory is made.
        stale_s: seconds without a change after which a lock is taken over.
        patience_s: seconds after which to give up if its owner is alive.
        beat_s: seconds between two changes.
        note: is told once that another run is waited for.
        clock: seconds, ascending.
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
            ValueError: as `attempt`.
        """
        while not self.attempt():
            time.sleep(_PAUSE_S)
        return self

    def attempt(self) -> bool:
        """Returns whether this run has the lock now; to be called again if not.

        Raises:
            ValueError: if another run has it and goes on, or the file is no lock of a run.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._create():
            return self._own()
        found, now = _read(self._path), self._clock()
        if not found and not self._path.exists():
            return False  # just deleted
        if not _FORM.match(found):
            raise self._foreign(found)
        if self._seen is None:
            self._begun = now
            self._note(
                f"{self._path.parent} is in use by {_described(found)}; waiting until it ends, or has been silent for "
                f"{self._stale_s:.0f} s"
            )
        if found != self._seen:
            self._seen, self._changed = found, now
        if now - self._changed > self._stale_s or _owner_has_died_here(self._path, found):
            if found.count("\n") < _LINES:
                raise self._foreign(found)
            return self._take_over()
        if now - self._begun > self._patience_s:
            raise ValueError(
                f"another run, {_described(found)}, writes to {self._path.parent} and goes on. Wait for it or end it, "
                f"or choose another --out. (If nothing runs there, delete {self._path}.)"
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
        """Makes the file, unless there is one."""
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        except FileExistsError:
            return False
        self._write(os.fdopen(descriptor, "r+"))
        return True

    def _take_over(self) -> bool:
        """Puts this run's file in the place of one that nobody owns; of several that do so, the last one succeeds."""
        mine = self._path.with_name(f"{self._path.name}.{self.ownership.token}")
        self._write(mine.open("x+"))
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

    def _write(self, file: IO[str]) -> None:
        """Writes the file's lines: token, boot of the machine, who, and a count."""
        boot = ""
        with contextlib.suppress(OSError):  # not every file system can; then only silence tells
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            boot = _boot()
        who = f"process {os.getpid()} on {socket.gethostname()}"
        file.write(f"{self.ownership.token}\n{boot}\n{who}\n{0:020d}\n")
        file.flush()
        os.fsync(file.fileno())
        self._file = file

    def _beat(self) -> None:
        """Counts, in the file that this run has made: another that takes its place is not touched."""
        assert self._file is not None
        descriptor = self._file.fileno()
        place = os.fstat(descriptor).st_size - 21
        count = 0
        while not self._released.wait(self._beat_s):
            count += 1
            with contextlib.suppress(OSError):  # the owner looks at its token before it does anything
                os.pwrite(descriptor, f"{count:020d}\n".encode(), place)
                os.fsync(descriptor)


def is_lock(path: Path) -> bool:
    """Returns whether a file is a lock, or one that is just being written."""
    return path.is_file() and _FORM.match(_read(path)) is not None


def _read(path: Path) -> str:
    """Returns the lines of a lock, nothing if there is none."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _described(found: str) -> str:
    """Returns who has a lock, for a terminal."""
    return printable("".join(found.splitlines()[2:3])[:100]) or "an unknown process"


def _boot() -> str:
    """Returns a name of this start of this machine's system, which no other has; nothing if there is none."""
    with contextlib.suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def _owner_has_died_here(path: Path, found: str) -> bool:
    """Says whether the owner ran under this very system, which has released its lock on the file: it is dead, and
    nobody needs to wait."""
    boot = _boot()
    if not boot or found.splitlines()[1:2] != [boot] or found.count("\n") < _LINES:
        return False
    with contextlib.suppress(OSError), path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _read(path)[:_TOKEN_DIGITS] == found[:_TOKEN_DIGITS]
    return False
