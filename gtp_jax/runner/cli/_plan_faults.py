"""`gtp-jax plan-faults`: plans how a run continues when devices have failed."""

from __future__ import annotations

import argparse

from ..flags import FaultOptions, add_flags, from_settings, given
from ._parser import AddParser

_EXAMPLES = """\
examples:
  gtp-jax plan-faults --tp 8 --failed-devices 3            two replicas of tp 8, one device lost
  gtp-jax plan-faults --preset 70b --gtp 4 --tp 8 --failed-devices 3 40
"""


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Shows which devices continue at which tensor-parallel degree, what is sent between them, how much "
        "memory they need, and the throughput compared with dropping replicas. Computed from shapes; needs no device.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=("preset", "dp", "gtp", "tp", "failed-devices", "batch", "memory"),
    )
    add_flags(parser, FaultOptions)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: if no plan is possible, or it does not fit into memory.
    """
    from ...inspect import fault_text, inspect_faults

    options = from_settings(FaultOptions, given(args, FaultOptions))
    print(fault_text(inspect_faults(options), options.chip))
    return 0
