"""Flags that several subcommands take, and kinds of them."""

from __future__ import annotations

import argparse
import shutil
import sys
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


def check_torch_python(name: str) -> None:
    """Checks that `--torch-python` names a program that can be started.

    Raises:
        ValueError: if it does not.
    """
    if shutil.which(name) is None:
        raise ValueError(f"`--torch-python` is {name!r}, which is no program that can be started.")


def check_files(*paths: Path | None) -> None:
    """Checks that files can be written to these places.

    Raises:
        ValueError: naming the folder that is not there, or what is one.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a directory; name a file, in it for instance.")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{path.absolute().parent} is no directory; create it first, or name another file.")


def add_run_flags(topic: argparse.ArgumentParser, *, timeout_s: int, one: str) -> None:
    """Adds the flags of commands that run programs one after the other, each in its own process.

    Args:
        topic: the parser.
        timeout_s: seconds for one of them.
        one: what one of them is called.
    """
    topic.add_argument(
        "--timeout", type=positive, default=timeout_s, metavar="S", help=f"seconds for one {one} (default: %(default)s)"
    )
    topic.add_argument("--within", type=positive, metavar="MIN", help="minutes for all; later ones are skipped")
    topic.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PATH",
        help="the Python that has torch (default: this one)",
    )


def add_file_flags(topic: argparse.ArgumentParser, **files: str) -> None:
    """Adds flags that name files to write: `--json`, `--png`; the values are their help."""
    for name, text in files.items():
        topic.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def seconds_within(args: argparse.Namespace) -> float:
    """Returns the seconds of `--within`, infinite if it is not given."""
    return 60 * args.within if args.within else float("inf")
