"""`gtp-jax inspect`: how weights are cut, what moves, how much memory it takes, and what runs under what."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from .._flags import count_or
from ..chain import REMAT
from ..inspect import Inspection, InspectOptions, as_json, as_text, draw, inspect
from ..models import PRESETS
from ..recipes import add_recipe


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    defaults = InspectOptions()
    parser = subparsers.add_parser(
        "inspect",
        help="show what a step costs on a mesh, without allocating the model",
        description="Compile a training step from shapes alone and show how weights are cut, what is communicated, "
        "how much memory a device needs and, for GPUs, in which order things run. Needs no GPU.",
    )
    parser.add_argument("--preset", default=defaults.preset, help=f"one of {', '.join(PRESETS)} (default: %(default)s)")
    parser.add_argument("--dp", type=int, default=defaults.dp, help="replicas of the sliced weights")
    parser.add_argument("--gtp", type=int, help="slices a weight is cut into (default: what dp and tp leave over)")
    parser.add_argument("--tp", type=int, default=defaults.tp, help="tensor-parallel degree")
    parser.add_argument("--batch", type=int, help="sequences of a step (default: one a rank and microbatch)")
    parser.add_argument("--seq", type=int, default=defaults.seq, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=defaults.microbatches, help="parts of a rank's batch")
    parser.add_argument("--unroll", type=count_or("full"), default=defaults.unroll, help="layers in a loop, or 'full'")
    parser.add_argument("--kept", type=count_or("all"), default=defaults.kept, help="layers that gather once, or 'all'")
    parser.add_argument(
        "--remat", choices=REMAT, default=defaults.remat, help="what a layer keeps for backward (default: %(default)s)"
    )
    parser.add_argument("--prefetch", action=argparse.BooleanOptionalAction, default=defaults.prefetch)
    parser.add_argument("--target", metavar="CHIP:DEVICES", help="compile for GPUs that are not there, e.g. h200:8")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the modelled timeline; needs --target")
    add_recipe(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: as `inspect`, or if a picture is wanted without a target.
    """
    names = (field.name for field in dataclasses.fields(InspectOptions))
    options = InspectOptions(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    if args.png is not None and options.target is None:
        raise ValueError("`--png` draws the schedule of a GPU program: give `--target`, `h200:8` for instance.")
    if args.png is not None and not args.png.absolute().parent.is_dir():
        raise ValueError(f"`--png` is {args.png}, whose directory does not exist. Make it first.")
    show(inspect(options), json_output=args.json, png=args.png)
    return 0


def show(found: Inspection, *, json_output: bool = False, png: Path | None = None) -> None:
    """Prints an inspection as tables or as JSON, and draws its timeline if it has one and a file is given."""
    print(json.dumps(as_json(found), indent=2) if json_output else as_text(found))
    if png is not None and found.timeline is not None:
        o = found.options
        mesh = " x ".join(f"{axis} {size}" for axis, size in found.degrees.items())
        draw(found.timeline, f"{o.preset} on {o.target}, {mesh}, {o.seq} tokens a sequence", png)
