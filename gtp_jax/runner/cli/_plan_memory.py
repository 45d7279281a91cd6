"""`gtp-jax plan-memory`: shows with which options the state of a training run fits on GPUs."""

from __future__ import annotations

import argparse

from ..._words import PRESET_NAMES
from ..flags import MemoryOptions, add_flags, from_settings, given
from ._parser import AddParser

_EXAMPLES = """\
examples:
  gtp-jax plan-memory 8b --target h200:1        8 billion parameters on one H200
  gtp-jax plan-memory 70b --target h100:32 --tp 8
"""


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Shows with which options the weights, AdamW's state and the gradients of a model fit into the "
        "memory of GPUs, and how much is left for activations. Computed from shapes; needs no device and compiles "
        "nothing.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        main=("preset", "target", "dp", "gtp", "tp", "cp", "ep"),
    )
    parser.add_argument(
        "preset", nargs="?", default=MemoryOptions.preset, metavar="PRESET", help=f"one of {', '.join(PRESET_NAMES)}"
    )
    add_flags(parser, MemoryOptions, but=("preset",))
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand.

    Raises:
        ValueError: if degrees do not fit the model or the number of GPUs.
    """
    from ...inspect import plan_memory

    print(plan_memory(from_settings(MemoryOptions, given(args, MemoryOptions))))
    return 0
