"""`gtp-jax bench`: measures, and prints ratios within one run. Its code is in `benchmarks`, in a checkout."""

from __future__ import annotations

import argparse
from typing import Any

from ._checkout import ELSEWHERE, benchmarks, has_benchmarks, refuse_elsewhere


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a training step, kernels, recipes or checkpoints, and compare them with alternatives",
        description="Measures on this machine." if has_benchmarks() else f"Not here: {ELSEWHERE}",
    )
    if has_benchmarks():
        benchmarks(".commands").add_topics(parser.add_subparsers(dest="topic", metavar="TOPIC", required=True))
    else:
        refuse_elsewhere(parser)
    return parser
