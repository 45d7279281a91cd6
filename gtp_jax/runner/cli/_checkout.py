"""Imports the benchmarks, which are in a checkout but not in the wheel."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[3]

ELSEWHERE = (
    "the benchmarks and their rivals are not installed with gtp_jax: they run in a checkout. Clone the repository, "
    "install it with `pip install -e .`, and run `python -m benchmarks` or `gtp-jax bench` there."
)


def has_benchmarks() -> bool:
    """Returns whether this package is part of a checkout."""
    return (_ROOT / "benchmarks" / "contenders").is_dir() and (_ROOT / "pyproject.toml").is_file()


def benchmarks(module: str = "") -> Any:
    """Returns the package `benchmarks` of the checkout, or a module in it.

    Raises:
        ValueError: if this package is not part of a checkout; the message says where the benchmarks are.
    """
    if not has_benchmarks():
        raise ValueError(ELSEWHERE)
    if sys.path[0] != str(_ROOT):
        sys.path.insert(0, str(_ROOT))  # before any other package of that name, such as one in the working directory
    return importlib.import_module(f"benchmarks{module}")


def refuse_elsewhere(parser: argparse.ArgumentParser, *but: str) -> None:
    """Makes a subcommand exit with a message that says where the benchmarks are.

    Args:
        parser: the parser of the subcommand.
        but: flags with which the subcommand works without benchmarks, in addition to -h and --help.
    """
    parse = parser.parse_known_args

    def checked(args: Any = None, namespace: Any = None) -> Any:
        if not any(word.partition("=")[0] in ("-h", "--help", *but) for word in args or ()):
            parser.error(ELSEWHERE)
        return parse(args, namespace)

    parser.parse_known_args = checked
