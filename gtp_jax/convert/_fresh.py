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

    Raises:
        ValueError: if `out` is a file, or a directory with something in it.
        OSError: if it cannot be made, naming it.
    """
    out = real_path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        what = "is a directory with something in it" if out.is_dir() else "is a file"
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


@contextmanager
def _naming(out: Path) -> Iterator[None]:
    """Names `out`, and not the directory that is written first, in errors of the system."""
    try:
        yield
    except OSError as error:
        reason = f"`out` cannot be made there ({error.strerror}). Choose another directory."
        raise OSError(error.errno, reason, str(out)) from error
