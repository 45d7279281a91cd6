"""`gtp-jax replay`: repeats a step of a run, to tell a fault of the program from a fault of a device."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._arguments import whole
from ._parser import AddParser

_DESCRIPTION = """\
Repeats a step of a run from the last checkpoint before it, compiled deterministically, twice on each of two placements
of the ranks on the devices, and compares every bit. Either the step is reproducible, so its data or program is at
fault; or a device is suspected; or the result is inconclusive. Needs one process with all devices of the run. Writes
nothing.
"""


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("gtp-run"), metavar="DIR", help="the directory of the run")
    parser.add_argument("--step", type=whole, metavar="N", help="the update (default: after the latest checkpoint)")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; the status is 0 if the step is reproducible, otherwise 1.

    Raises:
        ValueError: if there is nothing to replay.
    """
    from ...hlo import columns
    from ..trainer import replay

    found = replay(args.out, args.step)
    rows = [
        (" ".join(map(str, one.placement)), repr(one.loss), repr(one.norms[-1]), one.digest[:16]) for one in found.runs
    ]
    print(columns(("devices", f"loss of step {found.step}", "gradient norm", "state"), rows))
    print(f"\nfrom the checkpoint of step {found.begin}: {found.conclusion}: {found.reason}")
    return 0 if found.conclusion == "reproducible" else 1
