"""`gtp-jax doctor`: reports what is installed, what is missing, and what to do about it."""

from __future__ import annotations

import argparse

from ._later import later
from ._parser import AddParser


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Checks versions, devices and extras. The exit status is 1 if training cannot work here, otherwise "
        "0.",
    )
    parser.set_defaults(run=later("_doctor_report", "run"))
    return parser
