"""The in-memory directory that holds a run's snapshots, and its owner's lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO, Any

from ...checkpoint import Checkpoints

_OWNER = "owner"


class Memory:
    """A directory inside an in-memory file system such as /dev/shm. A context manager that frees it at the end.

    The owner holds a lock that the system releases when the owner dies, so the next owner on this machine can recognize
    abandoned directories and free them.

    Args:
        base: an in-memory directory.

    Raises:
        ValueError: if the directory does not exist or is not writable.
    """

    def __init__(self, base: Path) -> None:
        if not (base.is_dir() and os.access(base, os.W_OK | os.X_OK)):
            raise ValueError(f"`snapshot_dir` {base} is not a writable directory. Pass a directory in memory (tmpfs).")
        prefix = f"gtp-jax-{os.getuid()}-"
        self.freed = [path for path in sorted(base.glob(f"{prefix}*")) if _free_if_left_over(path)]
        self._lock, self.root = _own_new(base, prefix)

    @property
    def snapshots(self) -> Path:
        """The path of the snapshots, a directory of checkpoints."""
        return self.root / "snapshots"

    def latest(self) -> int | None:
        """Returns the step of the latest committed snapshot, or `None`."""
        return Checkpoints(self.snapshots, read_only=True).latest() if self.snapshots.is_dir() else None

    def sweep(self) -> None:
        """Frees incomplete snapshots that a killed fleet left behind."""
        committed = {str(step) for step in Checkpoints(self.snapshots, read_only=True).steps()}
        for path in self.snapshots.iterdir() if self.snapshots.is_dir() else ():
            if path.name not in committed:
                shutil.rmtree(path, ignore_errors=True)

    def drop_latest(self) -> None:
        """Frees the latest snapshot, because it is damaged."""
        if (step := self.latest()) is not None:
            shutil.rmtree(self.snapshots / str(step), ignore_errors=True)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()


def check_room(directory: Path, state_bytes: int) -> None:
    """Checks that an in-memory directory has room for two snapshots: each is kept until the next is committed.

    Raises:
        ValueError: if the directory has too little space, or the machine too little available memory.
    """
    needed = 2 * state_bytes
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(
            f"`snapshot_dir` {directory} has {free / 1e9:.2f} GB free, but two snapshots of this run's state need "
            f"{needed / 1e9:.2f} GB. Enlarge it (mount -o remount,size=..., or docker run --shm-size=...), or choose "
            "another directory in memory with --snapshot-dir."
        )
    available = _available_bytes()
    if available is not None and available < needed:
        raise ValueError(
            f"two snapshots of this run's state need {needed / 1e9:.2f} GB of memory, but only "
            f"{available / 1e9:.2f} GB are available on this machine. Run without --elastic, or choose a directory on "
            "a fast disk with --snapshot-dir."
        )


def _own_new(base: Path, prefix: str) -> tuple[IO[str], Path]:
    """Creates a directory and returns the lock on it and its path. Tries again if another run that is just starting
    frees the directory before it is locked, having mistaken it for an abandoned one."""
    while True:
        root = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            lock = (root / _OWNER).open("w")
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock.fileno()).st_nlink:
            return lock, root
        lock.close()


def _available_bytes() -> int | None:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    return None


def _free_if_left_over(path: Path) -> bool:
    """Frees a directory if its owner is dead, and returns whether it did."""
    try:
        lock: Any = (path / _OWNER).open("r+")
    except OSError:
        return False  # another run is just creating it
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        shutil.rmtree(path, ignore_errors=True)
    return True
