"""A directory that is there in full or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint import real_path


@contextmanager
def fresh_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` to write to, which takes its name at the end, or is deleted after an error.

    If `out` is a link, that is what it leads to.

    Raises:
        ValueError: if `out` is a file, a directory with something in it or that cannot be renamed, or a link that leads
            to itself.
        OSError: if it cannot be made, naming it.
    """
    out = real_path(out)
    if what := _hindrance(out):
        raise ValueError(f"`out` {out} {what}. Choose a new or an empty directory.")
    part = out.with_name(f".{out.name}.incomplete-{os.getpid()}")
    with _naming(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir()
    try:
        yield part
        with _naming(out):
            part.replace(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _hindrance(out: Path) -> str | None:
    """Returns why no directory can take this name, whose links have been followed; `None` if one can."""
    if out.is_symlink():
        return "is a link that leads to itself"
    if out.is_dir():
        if os.path.ismount(out):
            return "is where a file system is mounted, and must not be replaced"
        return "is a directory with something in it" if any(out.iterdir()) else None
    return "is a file" if out.exists() else None


@contextmanager
def _naming(out: Path) -> Iterator[None]:
    """Names `out`, and not the directory that is written first, in errors of the system."""
    try:
        yield
    except OSError as error:
        reason = f"`out` cannot be made there ({error.strerror}). Choose another directory."
        raise OSError(error.errno, reason, str(out)) from error
