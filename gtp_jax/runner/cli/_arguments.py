"""Checks and converts arguments of several subcommands."""

from __future__ import annotations

import argparse
from pathlib import Path


def positive(text: str) -> float:
    """Returns a number above 0, for `type=`."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a positive number")
    return value


def whole(text: str) -> int:
    """Returns a whole number of at least 1, for `type=`."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"is {text!r}; it must be a whole number of at least 1")
    return int(text)


def utf8(text: str) -> str:
    """Returns a text that UTF-8 can encode, for `type=`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"is {text!r}, which is not UTF-8 text; set the terminal to UTF-8, or convert the text with iconv"
        ) from None
    return text


def check_files(*paths: Path | None) -> None:
    """Checks that files can be written to these paths.

    Raises:
        ValueError: if a path is a directory, or its directory does not exist; the message names the directory.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a directory; name a file, for example in it.")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path.absolute().parent} is not a directory; create it first, or name another file.")
