"""Adds flags that several topics take, and checks and converts their values."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from gtp_jax.runner.cli import positive


def check_torch_python(name: str) -> None:
    """Checks that `--torch-python` names a program that can be started.

    Raises:
        ValueError: if it does not.
    """
    if shutil.which(name) is None:
        raise ValueError(f"`--torch-python` is {name!r}, which cannot be run. Give the path of a Python interpreter.")


def add_run_flags(topic: argparse.ArgumentParser, *, timeout_s: int, one: str) -> None:
    """Adds the flags of topics that run programs one after another, each in its own process.

    Args:
        topic: the parser.
        timeout_s: the default time limit of one program, in seconds.
        one: what the help calls one program.
    """
    topic.add_argument(
        "--timeout",
        type=positive,
        default=timeout_s,
        metavar="S",
        help=f"time limit in seconds for one {one} (default: %(default)s)",
    )
    topic.add_argument(
        "--within",
        type=positive,
        metavar="MIN",
        help="time limit in minutes for the whole run; what is running then is ended, and the rest is skipped",
    )
    topic.add_argument(
        "--torch-python",
        default=sys.executable,
        metavar="PATH",
        help="the Python interpreter that has PyTorch (default: this one)",
    )


def add_file_flags(topic: argparse.ArgumentParser, **files: str) -> None:
    """Adds flags that name files to write, such as `--json` and `--png`.

    Args:
        topic: the parser.
        files: the help of each flag, by its name.
    """
    for name, text in files.items():
        topic.add_argument(f"--{name}", type=Path, metavar="FILE", help=text)


def seconds_within(args: argparse.Namespace) -> float:
    """Returns the seconds of `--within`, infinite if it is not given."""
    return 60 * args.within if args.within else float("inf")
