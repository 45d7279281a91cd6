"""Opens the files that a run writes in its directory: regular files of its own, and nothing that a link leads to.

Opening a FIFO would wait for its other end, and writing through a link would change a file outside the directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..._foreign import check_regular, printable


def stranger(path: Path, *, directory: bool = False) -> str | None:
    """Returns what a path is that a run cannot use; `None` if it does not exist or is what a run makes.

    Args:
        path: the path of a file or directory of a run.
        directory: whether a run makes a directory of it, which may be a link to a directory; otherwise a regular file.
    """
    try:
        mode = os.lstat(path).st_mode
        if directory and stat.S_ISLNK(mode):
            mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None if not path.is_symlink() else f"a link to {printable(str(path.readlink()))}, which does not exist"
    if stat.S_ISLNK(mode):
        return f"a link to {printable(str(path.readlink()))}"
    if directory:
        return None if stat.S_ISDIR(mode) else "not a directory"
    try:
        check_regular(path, mode)
    except (ValueError, OSError):
        return "not a regular file"
    return None


def open_own(path: Path, flags: int) -> int:
    """Returns a descriptor of a file of a run. Never waits, and follows no link.

    Raises:
        ValueError: if the path is not a regular file.
        OSError: if the path is a link or a directory, or cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Removes what has this name, and yields a new file. Other names of the old file, if any, keep it.

    Raises:
        OSError: if it cannot be written; names the path.
    """
    with naming(path):
        path.unlink(missing_ok=True)
        with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            yield file


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to errors of the system that lack it, as those of writes do."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
