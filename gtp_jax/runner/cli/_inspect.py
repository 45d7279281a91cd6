"""`gtp-jax inspect`: shows how weights are sharded, what is communicated, the memory needed, and what overlaps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..flags import InspectOptions, add_flags, from_settings, given
from ._parser import AddParser
from ._waiting import waiting

if TYPE_CHECKING:
    from ...inspect import Inspection

# Measured on two cores: `tiny` 43 s, `1b` 71 s.
_USUALLY = "a minute for a small model, and several minutes for one of billions of parameters"

_EXAMPLES = """\
examples:
  gtp-jax inspect                                   the small model of `gtp-jax train`, on virtual CPU devices
  gtp-jax inspect --preset 8b --target h200:8       8 billion parameters on eight H200s
  gtp-jax inspect --preset 8b --target h200:8 --recipe nvfp4 --png step.png
  gtp-jax inspect --preset 70b --target h200:64 --gtp 8 --tp 8 --unroll 1 --network-rate 50
"""
# what `--help` shows
_MAIN = ("preset", "target", "dp", "gtp", "tp", "cp", "ep", "seq", "batch", "microbatches", "recipe", "remat", "unroll")
_MAIN += ("png", "json")


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Compiles a training step from shapes alone and shows how weights are sharded, what is "
        "communicated, how much memory a device needs and, for GPUs, the order of execution. Needs no GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=_MAIN,
    )
    add_flags(parser, InspectOptions)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the modelled timeline; needs --target")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: for the same reasons as `inspect`, or if `--png` is given without `--target` or its directory does
            not exist.
    """
    from ...inspect import inspect

    options = from_settings(InspectOptions, given(args, InspectOptions))
    if args.png is not None and options.target is None:
        raise ValueError("`--png` draws the schedule of a GPU program: give `--target`, such as `h200:8`.")
    if args.png is not None and not args.png.absolute().parent.is_dir():
        raise ValueError(f"`--png` is {args.png}, whose directory does not exist. Create it first.")
    if options.target is None:
        inspection = inspect(options)
    else:
        with waiting(f"inspect: compiling a step of {options.title} for {options.target}", _USUALLY):
            inspection = inspect(options)
    show(inspection, json_output=args.json, png=args.png)
    return 0


def show(inspection: Inspection, *, json_output: bool = False, png: Path | None = None) -> None:
    """Prints an inspection as tables or as JSON, and draws its timeline if it has one and a file is given."""
    from ...inspect import as_json, as_text, draw

    print(json.dumps(as_json(inspection), indent=2) if json_output else as_text(inspection))
    if png is not None and inspection.timeline is not None:
        o = inspection.options
        mesh = " x ".join(f"{axis} {size}" for axis, size in inspection.degrees.items())
        draw(
            inspection.over_network or inspection.timeline,
            f"{o.title} on {o.target}, {mesh}, {o.seq} tokens per sequence",
            png,
        )
