"""`gtp-jax plan`: proposes a mesh for a model on GPUs, says why, and shows what fits."""

from __future__ import annotations

import argparse

from ..._words import PRESET_NAMES
from ..flags import PlanOptions, add_flags, from_settings, given
from ._parser import AddParser

_EXAMPLES = """\
examples:
  gtp-jax plan 8b --target h200:64                      eight hosts of eight, 50 GB/s per GPU between them
  gtp-jax plan 70b --target h100:128 --network-rate 25 --batch 64
  gtp-jax plan qwen3-30b-a3b --target h200:16 --tp 1    one degree given, the others free
  gtp-jax plan 8b --target h200:1                       with which options it fits on one GPU
"""


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Models a training step of every way to divide a model among GPUs (dp x gtp x cp x ep x tp), and "
        "lists the fastest that fit, what they expose over which axis, and why; then shows with which options "
        "weights, AdamW's state and gradients fit. Computed from shapes in seconds; needs no device and compiles "
        "nothing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=("preset", "target", "network-rate", "seq", "batch", "microbatches", "dp", "gtp", "tp", "cp", "ep"),
    )
    parser.add_argument(
        "preset", nargs="?", default=PlanOptions.preset, metavar="PRESET", help=f"one of {', '.join(PRESET_NAMES)}"
    )
    add_flags(parser, PlanOptions, but=("preset",))
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: if an option is not allowed, or no placement fits the model, the batch and the number of GPUs.
    """
    from ...inspect import plan

    print(plan(from_settings(PlanOptions, given(args, PlanOptions))))
    return 0
