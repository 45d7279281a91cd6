"""Makes a directory that is either complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint import real_path


@contextmanager
def fresh_directory(out: Path) -> Iterator[Path]:
    """Yields a directory next to `out` to write to, which is renamed to `out` at the end or deleted after an error.

    If `out` is a link, its target is used instead.

    Raises:
        ValueError: if `out` is a file, a directory that is not empty or cannot be replaced, or a link that leads to
            itself.
        OSError: if the directory cannot be made; the message names `out`.
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
    """Returns why no directory can be made at this path, whose links have been followed; `None` if one can."""
    if out.is_symlink():
        return "is a link that leads to itself"
    if out.is_dir():
        if os.path.ismount(out):
            return "is a mount point, which must not be replaced"
        return "is a directory that is not empty" if any(out.iterdir()) else None
    return "is a file" if out.exists() else None


@contextmanager
def _naming(out: Path) -> Iterator[None]:
    """Makes system errors name `out` instead of the temporary directory."""
    try:
        yield
    except OSError as error:
        reason = f"`out` cannot be made there ({error.strerror}). Choose another directory."
        raise OSError(error.errno, reason, str(out)) from error
