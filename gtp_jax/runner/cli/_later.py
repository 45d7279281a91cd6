"""Imports what a command runs only once its arguments are known to be right."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable


def later(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """Returns a function that calls the function of this name in a module of this package, which may import JAX."""

    def run(args: argparse.Namespace) -> int:
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(args)

    return run
