"""Warnings of a command, in the form of its errors."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..._foreign import printable

_PACKAGE = str(Path(__file__).parents[2])


@contextmanager
def plain_warnings(command: str) -> Iterator[None]:
    """Prints this package's warnings as `gtp-jax COMMAND: warning: ...`; those of others as Python does.

    Leaves out the place in the package that raised the warning, because it does not tell a user what to do.
    """
    before = warnings.formatwarning

    def text(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(_PACKAGE):
            return f"gtp-jax {command}: warning: {printable(str(message), lines=True)}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = text
    try:
        yield
    finally:
        warnings.formatwarning = before
